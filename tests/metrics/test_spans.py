"""Requests as spans, as a collector gets them."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

import ull
from conftest import Spawn
from ull.daemon.config import parse_config
from ull.errors import ConfigError

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ull.metrics.spans import SpanExporter

PROMPT = "def main():"


def test_a_request_is_a_span_with_its_stages(spawn: Spawn) -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    spans = SpanExporter("", provider)
    daemon = spawn()
    with ull.Client(daemon.url) as client:
        client.generate(PROMPT, max_tokens=2).result()
        assert spans.poll(client, "tiny") == 0  # it had ended before
        for _ in range(70):  # more than one answer has room for
            client.generate(PROMPT, max_tokens=6).result()
        assert spans.poll(client, "tiny") == 70
        assert spans.poll(client, "tiny") == 0
    found = kept.get_finished_spans()
    requests = [span for span in found if span.name == "text_completion tiny"]
    assert len(requests) == 70
    attributes: Any = requests[0].attributes
    assert attributes["gen_ai.usage.input_tokens"] == 4
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert list(attributes["gen_ai.response.finish_reasons"]) == ["length"]
    assert 0 < attributes["gen_ai.server.time_to_first_token"] < 60
    context = requests[0].get_span_context()
    stages = [span for span in found if span.parent is not None and span.parent.span_id == context.span_id]
    assert {span.name for span in stages} == {"admission", "queue", "prefill", "first round", "decode"}
    for span in stages:
        assert requests[0].start_time <= span.start_time <= span.end_time <= requests[0].end_time  # type: ignore[operator]
    assert not any(PROMPT in str(span.attributes) for span in found)


class Collector(BaseHTTPRequestHandler):
    """Takes spans by OTLP over HTTP."""

    names: ClassVar[list[str]] = []
    arrived = threading.Event()

    def do_POST(self) -> None:
        message = ExportTraceServiceRequest()
        message.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        spans = [span for each in message.resource_spans for scope in each.scope_spans for span in scope.spans]
        self.names.extend(span.name for span in spans)
        self.send_response(200)
        self.end_headers()
        self.arrived.set()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_collector_gets_them(spawn: Spawn) -> None:
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        otlp = f"metrics.otlp=http://127.0.0.1:{server.server_port}"
        daemon = spawn("--set", "metrics.listen=127.0.0.1:0", "--set", otlp)
        with ull.Client(daemon.url) as client:
            for _ in range(200):  # until it has looked for the first time, what ends is of the time before
                client.generate(PROMPT, max_tokens=3).result()
                if Collector.arrived.wait(0.2):
                    break
        assert Collector.arrived.is_set()
        server.shutdown()
    assert "text_completion tiny" in Collector.names


def test_spans_are_sent_by_the_process_that_serves_figures() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.listen"):
        parse_config('metrics.otlp = "http://x:1"')
    with pytest.raises(ConfigError, match="http://host:port"):
        parse_config('metrics = {otlp = "x:1", listen = "127.0.0.1:1"}')
