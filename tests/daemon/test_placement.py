"""Which cores everything runs on: chosen, configured, shared with other daemons, and where the kernel says it runs."""

import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, Daemon, Spawn
from ull import Client
from ull.cores import core_list
from ull.daemon.config import Config, parse_config
from ull.daemon.placement import CoreClaims, Placement, place
from ull.errors import ConfigError, DaemonError

CORES = sorted(os.sched_getaffinity(0))
TWO_CORES = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
Claims = Callable[[], CoreClaims]


@pytest.fixture
def claims() -> Iterator[Claims]:
    """claims(): another daemon's claims, on a machine where only this test's daemons count."""
    prefix, made = f"ull-test-{uuid.uuid4()}-", []

    def make() -> CoreClaims:
        made.append(CoreClaims(prefix))
        return made[-1]

    yield make
    for each in made:
        each.release()


def placed(claims: CoreClaims, allowed: int, threads: int = 1, text: str = "") -> Placement:
    """Where a daemon with the configuration `text` runs on cores 0 to `allowed` - 1."""
    config: Config = parse_config(text)
    return place(
        config.engine,
        config.io,
        automatic=config.placement == "auto",
        threads=threads,
        allowed=range(allowed),
        claims=claims,
    )


def test_core_lists_read_like_the_kernel_s() -> None:
    assert core_list({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"


def test_the_last_cores_compute_and_the_rest_keeps_off_them(claims: Claims) -> None:
    two = placed(claims(), 2)
    assert (two.engine, two.computing, two.io, two.others) == (1, (1,), -1, {0})
    sixteen = placed(claims(), 16, threads=8)
    assert sixteen.computing == (15, 14, 13, 12, 11, 10, 9, 8)
    assert sixteen.others == {0, 2, 3, 4, 5, 6, 7}  # the other daemon computes on core 1
    for placement in (two, sixteen):
        assert placement.avoid == set(placement.computing)
        assert placement.cooperative and not placement.configured and placement.reason == ""


def test_without_a_core_to_spare_the_kernel_places(claims: Claims) -> None:
    one, all_compute = placed(claims(), 1), placed(claims(), 2, threads=2)
    off = placed(claims(), 2, text="placement = 'off'")
    assert one.reason == "1 computing and all other threads share 1 core"
    assert all_compute.reason == "2 computing and all other threads share 2 cores"
    assert off.reason == "placement is off"
    for placement, cores in ((one, {0}), (all_compute, {0, 1}), (off, {0, 1})):
        assert (placement.computing, placement.engine, placement.avoid) == ((), -1, set())
        assert placement.others == cores and placement.cooperative
    assert claims().claim(1)  # what was not taken is nobody's


def test_two_daemons_never_choose_the_same_core(claims: Claims) -> None:
    first, second, third = claims(), claims(), claims()
    assert [placed(each, 3).computing for each in (first, second)] == [(2,), (1,)]
    late = placed(third, 3)
    assert late.computing == () and late.others == {0, 1, 2}
    assert "other daemons compute" in late.reason
    first.release()
    assert (placed(third, 3).computing, placed(third, 3).others) == ((2,), {0})


def test_a_team_that_does_not_fit_claims_nothing(claims: Claims) -> None:
    assert placed(claims(), 5, threads=2).computing == (4, 3)
    assert placed(claims(), 5, threads=3).computing == ()
    assert placed(claims(), 5, threads=2).computing == (2, 1)


def test_configured_cores_are_taken_as_they_are(claims: Claims) -> None:
    given = placed(claims(), 8, threads=2, text="[engine]\ncores = [2, 3]\n[io]\ncore = 4")
    assert (given.computing, given.io, given.others) == ((2, 3), 4, {0, 1, 5, 6, 7})
    assert given.avoid == {2, 3, 4} and not given.cooperative
    engine_only = placed(claims(), 4, threads=2, text="[engine]\ncore = 1")
    assert engine_only.computing == (1,) and engine_only.others == {0, 2, 3}


def test_a_core_for_io_alone_leaves_the_engine_s_to_be_chosen(claims: Claims) -> None:
    for allowed, engine, others in ((2, 0, {1}), (8, 6, {1, 2, 3, 4, 5})):  # then core 0 is the first daemon's
        chosen = placed(claims(), allowed, text=f"[io]\ncore = {allowed - 1}")
        assert (chosen.engine, chosen.io, chosen.others) == (engine, allowed - 1, others)
        assert chosen.cooperative


def test_with_every_core_named_the_rest_shares_the_io_core(claims: Claims) -> None:
    both = placed(first := claims(), 2, text="[engine]\ncores = [0]\n[io]\ncore = 1")
    assert both.others == {1} and both.avoid == {0} and both.reason == ""
    first.release()
    all_engine = placed(claims(), 2, threads=2, text="[engine]\ncores = [0, 1]")
    assert all_engine.others == {0, 1} and all_engine.avoid == set()
    assert all_engine.reason == "no core is left for the rest of the daemon, which shares core 0-1"


def test_a_configured_core_of_another_daemon_is_reported_and_avoided(claims: Claims) -> None:
    text = "[engine]\ncore = 1"
    assert placed(claims(), 2, text=text).reason == ""
    second = placed(claims(), 2, text=text)
    assert second.computing == (1,) and "another daemon computes on core 1" in second.reason
    assert placed(claims(), 3).computing == (2,)


def test_unknown_and_contradictory_cores(claims: Claims) -> None:
    with pytest.raises(DaemonError, match="core 7 is not available here; available: 0-2"):
        placed(claims(), 3, text="[io]\ncore = 7")
    with pytest.raises(ConfigError, match=r"engine.core is 1, but engine.cores begins with 2"):
        parse_config("[engine]\ncore = 1\ncores = [2, 1]")


def test_who_has_a_priority_lets_others_run_on_its_core(claims: Claims) -> None:
    def check(allowed: int, text: str, threads: int = 1) -> None:
        mine, config = claims(), parse_config(text)
        try:
            placed(mine, allowed, threads, text).check_priorities(config.engine, config.io)
        finally:
            mine.release()

    check(2, "[engine]\npriority = 5")
    check(2, "[engine]\npriority = 5\ncore = 0\n[io]\npriority = 5\ncore = 1")
    check(3, "[engine]\ncore = 0\n[io]\npriority = 5\nidle = 'spin'\ncore = 1")
    for allowed, text, threads in (
        (1, "[engine]\npriority = 5", 1),
        (2, "placement = 'off'\n[engine]\npriority = 5", 1),
        (2, "[engine]\npriority = 5\ncores = [0, 1]", 2),
        (2, "[engine]\npriority = 5\ncore = 1\n[io]\ncore = 1", 1),
    ):
        with pytest.raises(DaemonError, match=r"engine\.priority needs cores of the engine's own"):
            check(allowed, text, threads)
    with pytest.raises(DaemonError, match=r"io\.priority with io\.idle = spin keeps everybody else off core 1"):
        check(2, "[engine]\ncore = 0\n[io]\npriority = 5\nidle = 'spin'\ncore = 1")


# ---- in a real daemon ----------------------------------------------------------------------------------------------


def cores_by_thread(pid: int, *expected: str) -> dict[str, set[int]]:
    """Of each thread of a process, by name; threads of one name together. Waits until the `expected` have their name.

    A thread of ours gives itself its name before it goes to its cores.
    """
    deadline = time.monotonic() + 60
    while True:
        found: dict[str, set[int]] = {}
        for task in Path(f"/proc/{pid}/task").iterdir():
            name = (task / "comm").read_text().strip()
            found[name] = found.get(name, set()) | os.sched_getaffinity(int(task.name))
        if found.keys() >= set(expected):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


def answered(daemon: Daemon) -> dict[str, Any]:
    """The placement in `info`, after a request that has gone by way of every thread, and all that the start logs."""
    daemon.wait_events("ready", 1)
    with Client(daemon.url) as client:
        assert client.generate("import ", max_tokens=4, ignore_eos=True).result().usage.completion_tokens == 4
        placement: dict[str, Any] = client.info().executor["placement"]
        return placement


def holds_latency(daemon: Daemon) -> bool:
    """Whether it keeps the processors out of sleep states that take long to leave."""
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a client's, closed meanwhile
            if link.readlink() == Path("/dev/cpu_dma_latency"):
                return True
    return False


def keeps_off(daemon: Daemon, core: int, owner: str = "ull-engine") -> None:
    """The thread `owner` has `core` alone; no other thread of the daemon may run there."""
    threads = cores_by_thread(daemon.pid, "ull-engine", "ull-io", "ull-watchdog", "ZMQbg/IO/0", "ZMQbg/Reaper")
    assert threads.pop(owner) == {core}
    assert not [name for name, cores in threads.items() if core in cores]


@pytest.fixture
def placed_daemon(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """spawn(**placed_daemon): a daemon that knows nothing of others than this test's."""
    monkeypatch.setenv("ULL_TEST_CLAIMS", f"ull-test-{uuid.uuid4()}-")
    return {"command": [sys.executable, str(ROOT / "tests/rigs/daemons/placed_daemon.py")]}


@TWO_CORES
def test_by_default_the_engine_has_the_last_core(spawn: Spawn, placed_daemon: dict[str, Any]) -> None:
    first = spawn(**placed_daemon)
    assert answered(first)["avoid_cores"] == [CORES[-1]]
    assert first.ready["avoid_cores"] == str(CORES[-1])
    keeps_off(first, CORES[-1])

    second = spawn(**placed_daemon)
    chosen = answered(second)["computing"]
    assert CORES[-1] not in chosen and (chosen != [] or "avoid_cores" not in second.ready)
    (said,) = second.events("cores")
    assert chosen or "other daemons compute" in said["message"]


@TWO_CORES
def test_everything_keeps_off_a_configured_engine_core(spawn: Spawn) -> None:
    daemon = spawn("--cores", f"{CORES[0]},{CORES[1]}")
    assert answered(daemon)["cooperative"] is False
    keeps_off(daemon, CORES[0])
    assert cores_by_thread(daemon.pid)["ull-io"] == {CORES[1]}
    assert holds_latency(daemon) != bool(daemon.events("idle"))  # where it is not permitted, a line says so


@TWO_CORES
def test_everything_keeps_off_an_io_core_that_others_need_not_share(spawn: Spawn) -> None:
    daemon = spawn("--set", "placement=off", "--set", f"io.core={CORES[-1]}")  # with an engine's core it takes three
    assert answered(daemon)["io"] == [CORES[-1]]
    keeps_off(daemon, CORES[-1], "ull-io")


def test_placement_off_leaves_every_thread_where_it_may_be(spawn: Spawn) -> None:
    daemon = spawn("--set", "placement=off")
    assert answered(daemon)["avoid_cores"] == [] and "avoid_cores" not in daemon.ready
    assert not holds_latency(daemon) and not daemon.events("idle")
    assert all(cores == set(CORES) for cores in cores_by_thread(daemon.pid).values())


def may_prioritise() -> bool:
    """Whether a thread of ours, which ends with the question, may have a real-time priority."""
    permitted = []

    def ask() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            return
        permitted.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return bool(permitted)


@TWO_CORES
@pytest.mark.skipif(not may_prioritise(), reason="needs the right to real-time priorities")
def test_priorities_reach_the_threads_that_they_are_for(spawn: Spawn) -> None:
    cores = f"{CORES[-1]},{CORES[0]}"
    daemon = spawn("--cores", cores, "--set", "engine.priority=3", "--set", "io.priority=4")
    answered(daemon)
    for task in Path(f"/proc/{daemon.pid}/task").iterdir():
        name, thread = (task / "comm").read_text().strip(), int(task.name)
        policy = os.sched_getscheduler(thread), os.sched_getparam(thread).sched_priority
        wanted = {"ull-engine": (os.SCHED_RR, 3), "ull-io": (os.SCHED_RR, 4)}
        assert policy == wanted.get(name, (os.SCHED_OTHER, 0)), name
