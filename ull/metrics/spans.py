"""Requests as OpenTelemetry spans, for those who ask for them: `metrics.otlp`, the extra `otel`.

One span for each request, with the attributes of the conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/), and below it one for each of its stages. They are made from what
`trace` tells of requests that have ended, without any text.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ull import wire
from ull.client import Client
from ull.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MISSING = "metrics.otlp needs the extra `otel`: pip install 'ull[otel]'"


class SpanExporter:
    """Sends the spans of requests that end from now on to `endpoint` (OTLP over HTTP, such as http://host:4318).

    `provider` stands in for the one that sends them. Raises ConfigError where the extra is missing.
    """

    def __init__(self, endpoint: str, provider: TracerProvider | None = None) -> None:
        try:
            self._provider = provider or _provider(endpoint)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{MISSING} (there is no module {error.name})", "metrics.otlp") from None
        self._tracer = self._provider.get_tracer("ull")
        self._next: int | None = None  # request; None: those that have ended before are nobody's business

    def poll(self, client: Client, model: str) -> int:
        """Makes spans of what has ended since; returns of how many. Raises UllError."""
        made = 0
        while True:
            reply = client.trace(steps=2**62, frames=2**62, requests=self._next or 0)
            if reply.next_request < (self._next or 0):  # another daemon
                self._next = 0
                continue
            known, self._next = self._next is not None, reply.next_request
            if known:
                for request in reply.requests:
                    self._span(request, model)
                made += len(reply.requests)
            if not reply.requests:
                return made

    def close(self) -> None:
        """Sends what waits."""
        self._provider.shutdown()

    def _span(self, request: wire.TracedRequest, model: str) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        times, usage = request.timeline, request.usage
        offset = time.time_ns() - time.monotonic_ns()
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "ull",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": f"{request.connection:x}-{request.request}",
            "gen_ai.response.finish_reasons": [request.finish_reason],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "ull.usage.cached_tokens": usage.cached_tokens,
            "ull.peer": request.peer,
        }
        if times.first_token_ns:
            attributes["gen_ai.server.time_to_first_token"] = (times.first_token_ns - times.received_ns) / 1e9
        span = self._tracer.start_span(
            f"text_completion {model}",
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=times.received_ns + offset,
        )
        inside = set_span_in_context(span)
        for name, begin_ns, end_ns in times.stages():
            self._tracer.start_span(name, inside, start_time=begin_ns + offset).end(end_ns + offset)
        if request.finish_reason == "error":
            span.set_status(StatusCode.ERROR)
        span.end(times.done_ns + offset)


def _provider(endpoint: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "ull"}))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=4096, schedule_delay_millis=1000))
    return provider
