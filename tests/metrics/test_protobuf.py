"""Native histograms in protobuf: what Prometheus itself makes of them."""

import json
import math
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

import ull
from conftest import Spawn
from ull import wire
from ull.metrics import protobuf
from ull.metrics.exposition import encode
from ull.metrics.families import HISTOGRAMS, health_of

ACCEPT = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,text/plain;q=0.3"
)


def test_a_bucket_has_its_middle_in_it() -> None:
    for upper_ns in (15, 1023, 65_535, 10**6, 10**9, 12 * 10**9):
        ((index, count),) = protobuf.native_buckets(wire.Histogram(sum=0, buckets=[(upper_ns, 7)])).items()
        assert count == 7
        assert 2 ** ((index - 1) / 8) * 0.97 < upper_ns * 1e-9 <= 2 ** (index / 8) * 1.03
    counts = protobuf.native_buckets(wire.Histogram(sum=0, buckets=[(n, 1) for n in range(1_000_000, 2_000_000, 1000)]))
    assert sum(counts.values()) == 1000
    assert list(counts) == sorted(counts)
    assert len(counts) == pytest.approx(8, abs=2)


def test_families_come_behind_their_lengths() -> None:
    data, content_type = encode([health_of("ok"), health_of("ok")], ACCEPT)
    assert content_type == protobuf.CONTENT_TYPE
    half = len(data) // 2
    assert data[:half] == data[half:]
    length, at = data[0] & 0x7F | (data[1] << 7 if data[0] & 0x80 else 0), 2 if data[0] & 0x80 else 1
    assert at + length == half
    assert b"ull_health" in data
    assert encode([health_of("ok")], "text/plain")[0].startswith(b"# HELP ull_health")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus (Debian's package prometheus)")
def test_prometheus_reads_both_forms(spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn("--set", "metrics.listen=127.0.0.1:0")
    with ull.Client(daemon.url) as client:
        for seed in range(20):
            client.generate("def main():", max_tokens=10, seed=seed).result()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = daemon.ready["metrics"].removeprefix("http://").removesuffix("/metrics")
    configuration = tmp_path / "prometheus.yml"
    job = f"{{job_name: ull, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]}}"
    configuration.write_text(f"scrape_configs: [{job}]\n")
    command = ["prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={tmp_path}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=native-histograms"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as prometheus:
        try:

            def ask(expression: str) -> float:
                """The value of an expression; NaN while there is none."""
                url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
                try:
                    with urllib.request.urlopen(url, timeout=20) as answer:
                        result = json.loads(answer.read())["data"]["result"]
                except OSError:
                    return math.nan
                return float(result[0]["value"][1]) if result else math.nan

            deadline = time.monotonic() + 120
            while ask("ull_requests_accepted_total") != 20:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
                time.sleep(0.5)
            for _, (name, _) in HISTOGRAMS.items():
                assert ask(f"histogram_count({name})") > 0  # only native ones have one
            median = ask("histogram_quantile(0.5, ull_time_to_first_token_seconds)")
            with ull.Client(daemon.url) as client:
                expected = client.stats().latency["time_to_first_token"]["p50_ns"] * 1e-9
            assert median == pytest.approx(expected, rel=0.25)
            assert ask('ull_request_success_total{finished_reason="length"}') == 20
            assert ask("ull_build_info") == 1
        finally:
            prometheus.terminate()
