"""The process that monitors ask: what it says of a real daemon, and what it does about hostile monitors and ends."""

import contextlib
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

import ull
from conftest import Daemon, Spawn
from curve_rig import Keys
from ull.errors import DaemonError

PAGE = (Path(__file__).parents[2] / "docs/monitoring.md").read_text()
LISTEN = ("--set", "metrics.listen=127.0.0.1:0")
PROMPT = "def main():"


def ask(daemon: Daemon, path: str = "/metrics", accept: str = "") -> str:
    url = daemon.ready["metrics"].removesuffix("/metrics") + path
    question = urllib.request.Request(url, headers={"accept": accept} if accept else {})
    with urllib.request.urlopen(question, timeout=30) as answer:
        return str(answer.read().decode())


def ask_until(daemon: Daemon, text: str) -> str:
    """What an answer says that has `text` in it: where the machine is busy, the exporter may be late at first."""
    deadline = time.monotonic() + 60
    while True:
        said = ""
        with contextlib.suppress(OSError):
            said = ask(daemon)
        if text in said:
            return said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)


def values(text: str) -> dict[str, float]:
    """By name and labels, such as `x{a="b"}`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_the_figures_are_those_of_stats(spawn: Spawn) -> None:
    daemon = spawn(*LISTEN)
    with ull.Client(daemon.url) as client:
        for seed in range(5):
            client.generate(PROMPT, max_tokens=20, seed=seed).result()
        with pytest.raises(ull.RequestError):
            client.generate(PROMPT, max_tokens=-1).result()
        time.sleep(0.3)  # figures and answers may be that old
        stats = client.stats(histograms=True)
    told = values(ask_until(daemon, "ull_up 1.0"))
    assert told['ull_health{status="ok"}'] == 1
    assert told["ull_requests_accepted_total"] == 5
    assert told['ull_request_success_total{finished_reason="length"}'] == stats.requests["finished"]["length"]
    assert told['ull_requests_refused_total{code="bad_request"}'] == 1
    assert told["ull_generation_tokens_total"] == 100
    assert told["ull_prompt_tokens_total"] == stats.requests["prompt_tokens"]
    for name in ("ull_time_to_first_token_seconds", "ull_e2e_request_latency_seconds"):
        assert told[f"{name}_count"] == 5
    mean_s = stats.latency["time_to_first_token"]["mean_ns"] / 1e9
    assert told["ull_time_to_first_token_seconds_sum"] / 5 == pytest.approx(mean_s, rel=0.01)
    rounds = sum(value for name, value in told.items() if name.startswith("ull_speculation_rounds_total"))
    assert rounds == stats.engine["rounds"]
    assert told["ull_inter_token_gap_seconds_count"] == stats.engine["round_ns"]["count"] == rounds - 5
    assert told["ull_frame_delivery_seconds_count"] == stats.io["delivery_ns"]["count"]
    assert told["process_resident_memory_bytes"] > 20e6
    assert told['ull_kv_pages{state="used"}'] + told['ull_kv_pages{state="free"}'] == stats.engine["page_count"]
    assert sum(count for _, count in stats.histograms["round"].buckets) == stats.engine["round_ns"]["count"]


def test_the_page_lists_what_there_is(spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn(*LISTEN, "--set", f"journal.path={tmp_path}/journal.jsonl", script={"fail_step": 30})
    with ull.Client(daemon.url) as client, contextlib.suppress(ull.UllError):
        client.generate([5], max_tokens=-1).result()
    text = ask_until(daemon, "ull_up 1.0")
    exported = {name for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE) if "_created" not in name}
    listed = {name for name in re.findall(r"`((?:ull|process)_\w+)`", PAGE) if "_gpu_" not in name}
    assert exported - {"ull_requests_refused_total"} <= listed
    assert listed - {"ull_up"} <= exported | {"ull_request_errors_total", "ull_request_success_total"}


def test_others_names_and_formats(spawn: Spawn) -> None:
    daemon = spawn(*LISTEN, "--set", "metrics.compat=vllm")
    with ull.Client(daemon.url) as client:
        client.generate(PROMPT, max_tokens=20).result()
    told = values(ask_until(daemon, 'finished_reason="length",model_name="tiny"} 1.0'))
    assert told['vllm:request_success_total{finished_reason="length",model_name="tiny"}'] == 1
    assert told['vllm:generation_tokens_total{model_name="tiny"}'] == 20
    assert told['vllm:time_to_first_token_seconds_count{model_name="tiny"}'] == 1
    assert 'vllm:cache_config_info{block_size="64",model_name="tiny",num_gpu_blocks="16"}' in told
    openmetrics = ask(daemon, accept="application/openmetrics-text; version=1.0.0")
    assert openmetrics.endswith("# EOF\n")
    assert {family.name for family in parse_openmetrics(openmetrics)} >= {"ull_health", "ull_requests_accepted"}


def test_a_daemon_that_hangs_is_told_of(spawn: Spawn) -> None:
    daemon = spawn(*LISTEN, "--set", "engine.watchdog_ms=100", script={"hang_step": 20, "round_ns": 1_000_000})
    with ull.Client(daemon.url) as client:
        running = client.generate([5], max_tokens=100)
        next(running)
        deadline = time.monotonic() + 20
        while client.health().status != "stalled":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ask_until(daemon, 'ull_health{status="stalled"} 1.0')
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(daemon, "/health")
        assert (refused.value.code, refused.value.read()) == (503, b"stalled\n")
    os.kill(daemon.pid, signal.SIGSTOP)  # not even Python answers
    try:
        ask_until(daemon, "ull_up 0.0")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    daemon.kill()


def test_it_is_started_again_and_ends_with_the_daemon(spawn: Spawn) -> None:
    daemon = spawn(*LISTEN)
    exporter = children(daemon.pid, "ull.metrics")
    assert len(exporter) == 1
    os.kill(exporter[0], signal.SIGKILL)
    daemon.wait_events("metrics", 1)
    ask_until(daemon, "ull_up 1.0")
    (second,) = children(daemon.pid, "ull.metrics")
    daemon.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{second}/cmdline").exists() and b"ull" in Path(f"/proc/{second}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid: int, module: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                f"PPid:\t{pid}\n" in (path / "status").read_text()
                and module.encode() in (path / "cmdline").read_bytes()
            ):
                found.append(int(path.name))
    return found


def test_monitors_that_say_nothing_keep_nobody_out_for_long(spawn: Spawn) -> None:
    daemon = spawn(*LISTEN)
    host, port = daemon.ready["metrics"].removeprefix("http://").removesuffix("/metrics").split(":")
    mute = [socket.create_connection((host, int(port))) for _ in range(40)]
    ask_until(daemon, "ull_up 1.0")
    for peer in mute:
        peer.close()
    with socket.create_connection((host, int(port))) as rude:
        rude.settimeout(20)
        rude.sendall(b"\x00\xff" * 40_000)
        with contextlib.suppress(OSError):
            while rude.recv(4096):
                pass
    for path in ("/", "/metrics/x", "/etc/passwd"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(daemon, path)


def test_it_has_a_key_of_its_own(spawn: Spawn, tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    daemon = spawn(*keys.settings(), *LISTEN, url="tcp://127.0.0.1:0")
    ask_until(daemon, "ull_up 1.0")


@pytest.mark.parametrize(
    "listen, said", [("nonsense", "host:port"), ("127.0.0.1:99999", "host:port"), ("192.0.2.1:9464", "cannot listen")]
)
def test_an_address_that_cannot_be_stops_the_start(spawn: Spawn, listen: str, said: str) -> None:
    with pytest.raises(DaemonError, match=said):
        spawn("--set", f"metrics.listen={listen}")
