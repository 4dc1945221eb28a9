"""Histograms, counters and log lines of the daemon."""

import io
import json
import os
import random
import select
import socket
import time
from pathlib import Path

import pytest

from ull.daemon.metrics import DutyCycle, LatencyHistogram, Metrics, inter_token_ns
from ull.log import Log, LogQueue
from ull.wire import Ended, Speculation, Timeline, Usage, added


def ended(reason: str = "stop", tokens: int = 3, client: str = "ok", delivered: bool = True, **times: int) -> Ended:
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=tokens)
    return Ended(
        identity=b"c",
        id=1,
        finish_reason=reason,
        usage=usage,
        timeline=Timeline(**times),
        seed=0,
        client=client,
        delivered=delivered,
    )


def test_quantiles_are_close_above_the_truth() -> None:
    chance = random.Random(3)
    values = [int(chance.lognormvariate(12, 2)) for _ in range(5000)]
    histogram = LatencyHistogram()
    for value in values:
        histogram.record(value)
    values.sort()
    for fraction in (0.01, 0.5, 0.9, 0.99, 0.999, 1.0):
        truth = values[max(0, -(-int(fraction * 5000) // 1) - 1)]
        assert truth <= histogram.quantile(fraction) <= truth * 17 / 16 + 1
    snapshot = histogram.snapshot()
    assert (snapshot["count"], snapshot["max_ns"]) == (5000, values[-1])
    assert snapshot["mean_ns"] == sum(values) // 5000


def test_an_empty_histogram_and_odd_values() -> None:
    histogram = LatencyHistogram()
    assert set(histogram.snapshot().values()) == {0}
    histogram.record(-5)
    histogram.record(0)
    assert (histogram.quantile(1.0), histogram.snapshot()["count"]) == (0, 2)


def test_counters_follow_ended_requests() -> None:
    metrics = Metrics()
    times = {"received_ns": 100, "admitted_ns": 150, "started_ns": 200, "prefilled_ns": 400, "first_token_ns": 500}
    metrics.ended(ended(last_token_ns=900, done_ns=910, **times))
    metrics.ended(ended("cancelled", tokens=0, client="gone", delivered=False, received_ns=100, done_ns=300))
    requests = metrics.requests()
    assert requests["finished"] == {"stop": 1, "cancelled": 1}
    assert requests["clients"] == {"ok": 1, "gone": 1}
    assert (requests["undelivered"], requests["completion_tokens"], requests["cached_tokens"]) == (1, 3, 8)
    latency = metrics.latency()
    assert latency["time_to_first_token"]["max_ns"] == 400
    assert (latency["queue"]["max_ns"], latency["prefill"]["max_ns"]) == (50, 200)
    assert (latency["inter_token"]["max_ns"], latency["inter_token"]["count"]) == (200, 1)
    assert (latency["end_to_end"]["count"], latency["time_to_first_token"]["count"]) == (2, 1)


def test_a_duty_cycle_counts_turns_and_stalls() -> None:
    duty = DutyCycle(stall_ns=100)
    for took_ns in (40, 100, 101):
        duty.record(took_ns)
    assert duty.snapshot() == {"cycles": 3, "working_ns": 241, "longest_ns": 101, "stalls": 1, "stall_ns": 100}


def test_inter_token_time_needs_two_tokens() -> None:
    assert inter_token_ns(ended(tokens=1, first_token_ns=5, last_token_ns=5)) is None
    assert inter_token_ns(ended(tokens=3, first_token_ns=100, last_token_ns=300)) == 100


def rounds(rounds: int, tokens: int, by_drafter: dict[str, int], by_depth: list[int]) -> Speculation:
    return Speculation(
        rounds=rounds,
        drafted_tokens=3 * sum(by_drafter.values()),
        accepted_tokens=sum(by_depth),
        tokens_per_round=tokens / rounds,
        by_drafter=by_drafter,
        accepted_by_depth=by_depth,
    )


def test_speculation_adds_up() -> None:
    metrics = Metrics()
    record = ended()
    record.speculation = rounds(4, 6, {"suffix": 3, "none": 1}, [2])
    metrics.ended(record)
    record.speculation = rounds(6, 24, {"suffix": 1, "medusa": 5}, [6, 5, 7])
    metrics.ended(record)
    metrics.ended(ended("cancelled", tokens=0))
    total = metrics.speculation
    assert (total.rounds, total.drafted_tokens, total.accepted_tokens) == (10, 30, 20)
    assert total.tokens_per_round == pytest.approx(3.0)
    assert total.by_drafter == {"suffix": 4, "none": 1, "medusa": 5}
    assert total.accepted_by_depth == [8, 5, 7]
    assert added(Speculation(), Speculation()) == Speculation()


def test_text_lines_stay_one_line() -> None:
    stream = io.StringIO()
    Log(stream=stream).info("event", plain="a/b", number=1.5, whole=2.0, truth=True, nothing=None, odd='x "y"\nz é')
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r'info event plain=a/b number=1.5 whole=2 truth=true odd="x \"y\"\nz \u00e9"')


def test_json_lines() -> None:
    stream = io.StringIO()
    Log(form="json", stream=stream).warning("event", text="é\n", nothing=None, flag=False)
    record = json.loads(stream.getvalue())
    assert (record["level"], record["event"], record["text"], record["flag"]) == ("warning", "event", "é\n", False)
    assert "nothing" not in record


@pytest.mark.parametrize(("level", "written"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_levels(level: str, written: int) -> None:
    stream = io.StringIO()
    log = Log(level, stream=stream)
    for write in (log.debug, log.info, log.warning, log.error):
        write("event")
    assert len(stream.getvalue().splitlines()) == written


def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    Log(stream=stream).error("event")


# ---- the queue in front of standard error --------------------------------------------------------------------------


def read_until(descriptor: int, end: bytes) -> list[bytes]:
    """Lines from a pipe up to the first that holds `end`; fails after 20 seconds without one."""
    text = b""
    while end not in text or not text.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], 20)
        assert ready, text[-1000:]
        text += os.read(descriptor, 65536)
    return text.splitlines()


def test_a_log_that_nobody_reads_neither_waits_nor_grows_and_says_what_was_lost() -> None:
    reader, writer = os.pipe()
    queue = LogQueue(writer, "json")
    log = Log(form="json", stream=queue)
    written = 0
    while log.dropped < 100:  # far beyond what pipe and queue hold
        log.info("event", number=written, text="x" * 300)
        written += 1
    assert written < 10_000
    numbers: list[int] = []
    losses: list[int] = []
    while len(numbers) + sum(losses) < written:  # a slow reader is told once a second
        lines = [json.loads(line) for line in read_until(reader, b"lines were dropped")]
        losses += [line["dropped"] for line in lines if line["event"] == "log"]
        numbers += [line["number"] for line in lines if line["event"] == "event"]
    assert numbers == sorted(numbers) and len(numbers) + sum(losses) == written
    assert log.dropped == sum(losses) >= 100
    log.info("event", number=-1)
    assert json.loads(read_until(reader, b"-1")[-1])["number"] == -1
    queue.close(20)
    os.close(writer)
    os.close(reader)


def test_the_last_lines_are_written_at_the_end_within_a_limit() -> None:
    reader, writer = os.pipe()
    queue = LogQueue(writer)
    for number in range(100):
        Log(stream=queue).info("event", number=number)
    queue.close(20)
    assert len(read_until(reader, b"number=99")) == 100
    Log(stream=queue).info("event")  # too late: dropped, not waited for
    assert queue.dropped == 1
    stuck = LogQueue(writer)
    while stuck.dropped == 0:
        stuck.write("x" * 1000 + "\n")
    stuck.close(0.01)
    os.close(reader)  # the thread that waits in its write gets an error now, and ends
    stuck.close(20)
    os.close(writer)


def test_a_full_disk_costs_lines_and_is_told_of_once_there_is_room(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    target = os.open("/dev/full", os.O_WRONLY)
    os.dup2(descriptor, spare := os.dup(descriptor))
    os.dup2(target, spare)
    queue = LogQueue(spare)
    log = Log(stream=queue)
    for _ in range(3):
        log.info("event")
    deadline = time.monotonic() + 20
    while queue.dropped < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.dup2(descriptor, spare)
    log.info("event", number=4)
    queue.close(20)
    first, second = (tmp_path / "log").read_text().splitlines()
    assert "event number=4" in first and "log dropped=3" in second
    for one in (descriptor, target, spare):
        os.close(one)


def test_a_line_that_was_cut_does_not_spoil_the_next() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    one.setblocking(False)  # as whoever shares standard error may do
    queue = LogQueue(one.fileno())
    queue.write("x" * 400_000 + "\n")  # more than the socket holds: written in pieces, as it is read
    queue.write("next\n")
    text = b""
    other.settimeout(20)
    while not text.endswith(b"next\n"):
        text += other.recv(65536)
    assert text == b"x" * 400_000 + b"\nnext\n"
    assert queue.dropped == 0
    queue.close(20)
    one.close()
    other.close()
