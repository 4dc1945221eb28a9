"""`ull upgrade`: a daemon hands over to its successor, and nobody who is connected notices more than a pause."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

import ull
from conftest import Daemon, Spawn
from curve_rig import Keys, spawn_with_keys
from heirs import heirs, pid_of
from processes import descriptors
from raw_client import RawClient
from ull import cli, wire
from ull.curve import new_pair, write_key
from ull.spawn import ServerProcess, python_command

PROMPT = "def main():"
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 11, "ignore_eos": True}
SLOW = {"tokens": [65], "round_ns": 5_000_000, "context": 9000}
Answer = asyncio.Task[wire.UpgradeReply]
ENDLESS = 8000  # tokens of such a daemon: 40 seconds, in which every successor gets warm


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle that the test may change."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copy.ull"))


def tokens(client: ull.Client, prompt: str = PROMPT, **options: Any) -> list[int]:
    return client.generate(prompt, **(OPTIONS | options)).result().token_ids


def test_who_is_connected_goes_on_by_every_way(spawn: Spawn, keys: Keys) -> None:
    # A core's claim is a descriptor, which the successor has where another daemon on this machine has ended meanwhile.
    daemon = spawn_with_keys(spawn, keys, "--set", "placement=off")
    with (
        heirs(daemon),
        ull.Client(daemon.urls[1], transport="zeromq") as one,
        ull.Client(daemon.urls[1], transport="local") as two,
        ull.Client(daemon.url, keys=keys.file("bob")) as three,
        ull.Client(daemon.urls[1]) as admin,
    ):
        clients = (one, two, three)
        expected = [tokens(client) for client in clients]
        assert len({tuple(ids) for ids in expected}) == 1
        pids, opened = {pid_of(admin)}, descriptors(daemon.pid)
        for _ in range(2):
            answer = admin.upgrade()
            assert (answer.pid, answer.clients) == (pid_of(admin), 4)
            pids.add(answer.pid)
            assert [tokens(client) for client in clients] == expected
            assert {pid_of(client) for client in clients} == {answer.pid}
            with ull.Client(daemon.url, keys=keys.file("bob")) as late:
                assert tokens(late) == expected[0]
        assert len(pids) == 3
        daemon.wait_events("ready", 3)
        while descriptors(answer.pid) != opened:  # the late one's is on its way out
            time.sleep(0.01)


def test_sessions_go_on(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.kv_pages=64")
    with heirs(daemon), ull.Client(daemon.url) as client:

        def converse(upgrades: bool) -> list[Any]:
            said: list[Any] = []
            with client.open_session() as plain, client.open_session(pin=True) as pinned:
                for session in (plain, pinned):
                    said.append(session.generate("import os\n", **OPTIONS).result().token_ids)
                with plain.fork() as fork:
                    if upgrades:
                        assert client.upgrade().sessions == 3
                    said += [session.generate("x = ", **OPTIONS).result().token_ids for session in (fork, plain)]
                    said.append(plain.truncate(characters=3))
                    said.append(pinned.rollback(5))
                    said += [session.generate("y", **OPTIONS).result().token_ids for session in (pinned, plain)]
            return said

        assert converse(upgrades=True) == converse(upgrades=False)
        assert client.stats().requests["sessions"] == 0


async def until_warm(daemon: Daemon) -> None:
    """Waits for a successor that waits for the daemon's requests to end."""
    while len(daemon.events("upgrade")) < 2:
        await asyncio.sleep(0.01)


@asynccontextmanager
async def held_up(daemon: Daemon) -> AsyncIterator[tuple[ull.AsyncClient, ull.AsyncClient, ull.AsyncStream, Answer]]:
    """A warm successor waits for a client's endless stream: that client, who asked for it, the stream, the answer."""
    async with ull.AsyncClient(daemon.url) as client, ull.AsyncClient(daemon.url) as admin:
        stream = client.generate("a", max_tokens=ENDLESS)
        await anext(stream)
        upgrade = asyncio.create_task(admin.upgrade())
        await until_warm(daemon)
        yield client, admin, stream, upgrade


def test_a_stream_ends_where_it_began_and_what_comes_behind_it_waits(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)

    async def run() -> None:
        async with held_up(daemon) as (client, _, stream, upgrade):
            late = client.generate(PROMPT, **OPTIONS)
            ids = asyncio.create_task(client.tokenize("some words"))
            assert (await client.health()).status == "ok"
            assert not stream.finished
            stream.cancel()
            result = await stream.result()
            assert (result.finish_reason, set(result.token_ids)) == ("cancelled", {65})
            answer = await upgrade
            assert (answer.clients, answer.requests) == (2, 2)
            assert (await late.result()).token_ids == (await client.generate(PROMPT, **OPTIONS).result()).token_ids
            assert await ids == await client.tokenize("some words")

    with heirs(daemon):
        asyncio.run(run())


def test_what_is_said_of_a_running_request_is_heard_while_others_wait(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)

    async def run() -> None:
        async with ull.AsyncClient(daemon.url) as client, ull.AsyncClient(daemon.url) as admin:
            spoken = client.generate("a", max_tokens=ENDLESS)
            await anext(spoken)
            held = client.generate("b", max_tokens=3, hold=True)
            async with await client.open_session() as session:
                ahead = session.generate("c", max_tokens=3, hold=True)
                upgrade = asyncio.create_task(admin.upgrade())
                await until_warm(daemon)
                waiting = client.generate(PROMPT, **OPTIONS)
                dropped = client.generate(PROMPT, **OPTIONS)
                dropped.cancel()  # before anybody has looked at it
                otherwise = session.generate(PROMPT, **OPTIONS)  # in place of what was held
                commit = asyncio.create_task(held.commit())
                await client.health()
                spoken.cancel()  # somebody speaks in between
                assert (await spoken.result()).finish_reason == "cancelled"
                # What was held has been seen by nobody: the successor answers it.
                await commit
                assert (await held.result()).finish_reason == "length"
                assert (await ahead.result()).finish_reason == "cancelled"
                assert (await upgrade).requests == 7
                assert (await waiting.result()).finish_reason == "length"
                assert (await otherwise.result()).finish_reason == "length"
                assert (await dropped.result()).finish_reason == "cancelled"

    with heirs(daemon):
        asyncio.run(run())


def test_what_is_held_waits_for_its_commit_in_the_successor(spawn: Spawn) -> None:
    """Nobody is kept waiting for a commit that does not come, and the answer is the one that was held."""
    daemon = spawn("--set", "sessions.hold_timeout_s=1000")
    with heirs(daemon), ull.Client(daemon.url) as client:
        expected = tokens(client)
        with client.open_session() as session:
            held = [client.generate(PROMPT, hold=True, **OPTIONS), session.generate(PROMPT, hold=True, **OPTIONS)]
            answer = client.upgrade()
            assert (answer.requests, answer.sessions) == (2, 1)
            for stream in reversed(held):
                stream.commit()
                assert stream.result().token_ids == expected
            following = session.generate("x", **OPTIONS).result()
            assert following.usage.cached_tokens > len(expected)
    assert all(event["finish"] == "length" for event in daemon.events("request"))


def test_what_waits_is_bounded_as_the_queue_is(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.queue_depth=4", "--set", "engine.client_share=2", script=SLOW)

    async def run() -> None:
        async with held_up(daemon) as (client, admin, stream, upgrade):
            waiting = [client.generate(PROMPT, **OPTIONS) for _ in range(2)]
            with pytest.raises(ull.Busy, match="hands over"):
                await client.generate(PROMPT, **OPTIONS).result()
            other = admin.generate(PROMPT, **OPTIONS)
            stream.cancel()
            assert (await upgrade).requests == 3
            for each in (*waiting, other):
                assert (await each.result()).finish_reason == "length"

    with heirs(daemon):
        asyncio.run(run())


def test_a_client_that_hangs_up_meanwhile_is_not_handed_over(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)

    async def run() -> None:
        async with held_up(daemon) as (client, _, stream, upgrade):
            late = RawClient(daemon.url)
            for number in (1, 2):
                late.send_map(type="open_session", id=number, session=number)
            late.send_map(type="health", id=3)
            assert (await asyncio.to_thread(late.receive)).id == 3  # which does not wait
            late.close()
            while (await client.stats()).io["clients"] != 2:
                await asyncio.sleep(0.01)
            stream.cancel()
            answer = await upgrade
            assert (answer.clients, answer.sessions, answer.requests) == (2, 0, 0)

    with heirs(daemon):
        asyncio.run(run())


def test_nothing_is_refused_or_lost_under_load(spawn: Spawn) -> None:
    """Clients by both transports ask without waiting for each other, over three upgrades."""
    daemon = spawn()
    ended: list[ull.Result] = []

    async def load(transport: Any, stop: asyncio.Event) -> None:
        async with ull.AsyncClient(daemon.url, transport=transport) as client:
            while not stop.is_set():
                streams = [client.generate(PROMPT, **OPTIONS) for _ in range(3)]
                async with await client.open_session() as session:
                    ended.append(await session.generate(PROMPT, **OPTIONS).result())
                ended.extend([await stream.result() for stream in streams])

    async def run() -> int:
        stop, requests = asyncio.Event(), 0
        loads = [asyncio.create_task(load(transport, stop)) for transport in ("zeromq", "local", "local", "zeromq")]
        async with ull.AsyncClient(daemon.url) as admin:
            for _ in range(3):
                requests += (await admin.upgrade()).requests
        stop.set()
        await asyncio.gather(*loads)
        return requests

    with heirs(daemon):
        requests = asyncio.run(run())
    assert {tuple(result.token_ids) for result in ended} == {tuple(ended[0].token_ids)}
    assert {result.finish_reason for result in ended} == {"length"}
    assert daemon.events("refused") == []
    own = [event for event in daemon.events("request") if event["level"] != "debug"]
    assert len(own) == len(ended)
    assert all(event["delivered"] for event in own)
    assert requests > 0  # some came while it handed over
    assert len(daemon.events("ready")) == 4


def test_the_journal_is_one_chain_and_monitors_find_the_successor(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "journal" / "journal.jsonl"
    path.parent.mkdir()
    daemon = spawn("--set", f"journal.path={path}", "--set", "metrics.listen=127.0.0.1:0")
    with heirs(daemon), ull.Client(daemon.url) as client:
        for _ in range(2):
            tokens(client)
            client.upgrade()
        tokens(client)
        daemon.wait_events("ready", 3)
        figures = urllib.request.urlopen(daemon.ready["metrics"], timeout=30).read().decode()
        assert "ull_requests_accepted_total 1.0" in figures
    assert cli.main(["journal", "verify", str(path.parent)]) == 0


def test_a_client_that_does_not_read_gets_what_it_was_owed(spawn: Spawn) -> None:
    daemon = spawn()
    silent = RawClient(daemon.url)
    with heirs(daemon), closing(silent), ull.Client(daemon.url) as admin:
        count = 300  # answers that no socket has room for
        for number in range(1, count + 1):
            silent.send_map(type="info", id=number)
        time.sleep(0.5)
        admin.upgrade()
        seen = [silent.receive().id for _ in range(count)]
        assert seen == list(range(1, count + 1))


def test_a_successor_that_cannot_start_changes_nothing(spawn: Spawn, copy: Path, tmp_path: Path) -> None:
    daemon = spawn(bundle=copy)
    with heirs(daemon), ull.Client(daemon.url) as client:
        expected, pid = tokens(client), pid_of(client)
        with client.open_session() as session:
            session.generate("import os\n", **OPTIONS).result()
            away = copy.rename(tmp_path / "away.ull")
            with pytest.raises(ull.RequestError, match=r"no engine bundle at .*copy\.ull") as refused:
                client.upgrade()
            assert refused.value.code == "upgrade_failed"
            assert (tokens(client), pid_of(client)) == (expected, pid)
            away.rename(copy)
            assert client.upgrade().sessions == 1
            assert session.generate("x", **OPTIONS).result().finish_reason == "length"
        assert (tokens(client), pid_of(client) == pid) == (expected, False)
    assert [event["level"] for event in daemon.events("upgrade")] == ["info", "error", "info", "info", "info"]


def test_a_successor_that_cannot_take_over_changes_nothing(spawn: Spawn, tmp_path: Path) -> None:
    """It finds out once everything stands still: connections, journal and metrics are gone on with."""
    config, journal = tmp_path / "ull.toml", tmp_path / "journal"
    journal.mkdir()
    text = f'[journal]\npath = "{journal}/journal.jsonl"\n[metrics]\nlisten = "127.0.0.1:0"\n'
    config.write_text(text)
    daemon = spawn("--config", str(config))
    with heirs(daemon), ull.Client(daemon.url) as client, ull.Client(daemon.url) as other:
        expected, pid = tokens(client), pid_of(client)
        config.write_text(text.replace("journal.jsonl", "missing/journal.jsonl"))
        with pytest.raises(ull.RequestError, match=r"goes on as it was: journal\.path"):
            client.upgrade()
        assert (tokens(other), pid_of(client)) == (expected, pid)
        figures = urllib.request.urlopen(daemon.ready["metrics"], timeout=30).read().decode()
        assert "ull_requests_accepted_total 2.0" in figures
        config.write_text(text)
        client.upgrade()
        assert tokens(other) == expected
    assert cli.main(["journal", "verify", str(journal)]) == 0


def test_what_clients_rely_on_must_be_the_same(tiny_bundle: Path, tmp_path: Path, keys: Keys) -> None:
    config, url = tmp_path / "ull.toml", f"ipc://{tmp_path}/s.sock"
    access = f'[access]\nserver_key = "{keys.directory}/server.key"\nclients = "{keys.list}"\n'
    text = f'listen = ["{url}", "tcp://127.0.0.1:0"]\n{access}'
    config.write_text(text)
    command = [*python_command("ull.daemon"), str(tiny_bundle), "--config", str(config), "--threads", "1"]
    with ServerProcess(command, "the daemon", tmp_path / "log") as daemon, ull.Client(url) as client:
        config.write_text(text.replace("s.sock", "t.sock"))
        with pytest.raises(ull.RequestError, match="listen has changed"):
            client.upgrade()
        config.write_text(text)
        server = keys.directory / "server.key"
        server.unlink()
        write_key(server, new_pair(), name="ulld")
        with pytest.raises(ull.RequestError, match=r"access\.server_key has changed"):
            client.upgrade()
        assert pid_of(client) == daemon.pid


def test_a_successor_that_is_killed_changes_nothing(spawn: Spawn) -> None:
    daemon = spawn()

    async def run() -> None:
        async with ull.AsyncClient(daemon.url) as client, ull.AsyncClient(daemon.url) as admin:
            expected = (await client.generate(PROMPT, **OPTIONS).result()).token_ids
            upgrade = asyncio.create_task(admin.upgrade())
            while not (events := daemon.events("upgrade")):
                await asyncio.sleep(0.01)
            with pytest.raises(ull.RequestError, match="being started already"):
                await client.upgrade()
            os.kill(events[0]["successor"], signal.SIGKILL)
            with pytest.raises(ull.RequestError, match="status -9"):
                await upgrade
            assert (await client.generate(PROMPT, **OPTIONS).result()).token_ids == expected
            assert (await client.info()).executor["pid"] == daemon.pid

    with heirs(daemon):
        asyncio.run(run())


def test_a_stop_gives_up_the_successor(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)

    async def run() -> int:
        async with held_up(daemon) as (client, _, stream, upgrade):
            successor: int = daemon.events("upgrade")[1]["successor"]
            late = client.generate("b", max_tokens=2)
            assert (await client.health()).status == "ok"
            daemon.process.send_signal(signal.SIGTERM)
            with pytest.raises(ull.RequestError, match="being stopped"):
                await upgrade
            # What was set aside came before the stop: it is served here.
            stream.cancel()
            assert (await late.result()).finish_reason == "length"
            assert (await stream.result()).finish_reason == "cancelled"
            return successor

    successor = asyncio.run(run())
    assert daemon.process.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(successor, 0)


def test_another_vocabulary_ends_sessions_and_nothing_else(
    spawn: Spawn, copy: Path, pristine: Path, tmp_path: Path
) -> None:
    daemon = spawn(bundle=copy)
    with heirs(daemon), ull.Client(daemon.url) as client:
        session = client.open_session()
        copy.rename(tmp_path / "away.ull")
        shutil.copytree(pristine, copy)
        assert client.upgrade().sessions == 0
        assert client.info().engine["name"] == "x"
        assert client.generate("a", max_tokens=3, ignore_eos=True).result().finish_reason == "length"
        with pytest.raises(ull.RequestError) as refused:
            session.generate("a", max_tokens=3).result()
        assert refused.value.code == "unknown_session"


def test_the_first_process_of_a_container_has_no_successor(spawn: Spawn) -> None:
    enter = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespace can be made here")
    daemon = spawn(command=[*enter, *python_command("ull.daemon")])
    with ull.Client(daemon.url) as client:
        with pytest.raises(ull.RequestError, match="process 1 of its container"):
            client.upgrade()
        assert len(tokens(client)) == 24
    daemon.kill()  # who has made the namespace passes no other signal on


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_have_their_cores_once_the_predecessor_has_gone(spawn: Spawn) -> None:
    engine, io = sorted(os.sched_getaffinity(0))[:2]
    daemon = spawn("--cores", f"{engine},{io}")

    def placed(pid: int) -> dict[str, set[int]]:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        named = {(task / "comm").read_text().strip(): os.sched_getaffinity(int(task.name)) for task in tasks}
        return {name: cores for name, cores in named.items() if name in ("ull-engine", "ull-io")}

    with heirs(daemon), ull.Client(daemon.url) as client:
        before = placed(daemon.pid)
        assert before == {"ull-engine": {engine}, "ull-io": {io}}
        successor = client.upgrade().pid
        daemon.wait_events("ready", 2)
        assert placed(successor) == before
    first, second = daemon.events("cores")
    varying = {"time": "", "level": "", "message": ""}  # other tests' daemons may compute on the same cores
    assert first | varying == second | varying


def test_it_is_for_admins(spawn: Spawn, keys: Keys) -> None:
    daemon = spawn_with_keys(spawn, keys)
    with ull.Client(daemon.url, keys=keys.file("bob")) as client, pytest.raises(ull.Forbidden, match="upgrade"):
        client.upgrade()


def test_the_command(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = spawn()
    with heirs(daemon):
        assert cli.main(["upgrade", "--connect", daemon.url]) == 0
        said = capsys.readouterr().out
        pid = daemon.wait_events("ready", 2)[-1]["pid"]
        assert said.startswith(f"process {daemon.pid} has handed over to {pid} (ull {ull.__version__}): 1 connections")
