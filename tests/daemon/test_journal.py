"""The journal's writer: whole lines or none, one chain over everything that may happen to its file and its disk."""

import errno
import io
import os
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import Spawn
from journals import break_of, header, read, request, write
from processes import ulld
from ull import wire
from ull.client import Client
from ull.daemon import journal as journal_module
from ull.daemon.config import Config, JournalConfig, parse_config
from ull.daemon.journal import Journal
from ull.daemon.journal_file import JournalFile
from ull.daemon.turn import Turn
from ull.errors import ConfigError, DaemonError, JournalUnavailable
from ull.journal import Dropped, Header, Recovered, Request, journal_files
from ull.log import Log
from ull.wire import Ended, Generate, Timeline, Usage


def kinds(*files: Path) -> list[str]:
    return [str(record.__struct_config__.tag) for record in read(*files)]


# ---- the file -----------------------------------------------------------------------------------------------------


def test_a_restart_goes_on_in_a_new_file(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path, request(number))
    files = journal_files([tmp_path])
    assert len(files) == 3 and files[-1] == tmp_path / "journal.jsonl"
    assert kinds(*files) == ["header", "request"] * 3
    assert [record.sequence for record in read(*files)] == list(range(1, 7))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.iterdir())
    assert break_of(files[1], files[2]) is None  # a part of the chain is sound too, ...
    assert break_of(files[0], files[2]) is not None  # ... but none may be left out


def test_a_path_is_a_file_or_a_directory(tmp_path: Path) -> None:
    assert write(tmp_path / "other.log") == tmp_path / "other.log"
    (tmp_path / "there").mkdir()
    assert write(tmp_path / "there") == tmp_path / "there/journal.jsonl"
    assert parse_config("") == Config() and Config().journal.path == ""
    with pytest.raises(ConfigError, match=r"journal\.required needs journal\.path"):
        parse_config("[journal]\nrequired = true")


def test_a_full_file_is_renamed_and_the_oldest_deleted(tmp_path: Path) -> None:
    big = list(range(100_000))  # half a megabyte of digits
    write(tmp_path, *(request(number, prompt=big) for number in range(14)), rotate_mb=1)
    files = journal_files([tmp_path])
    assert len(files) >= 5 and break_of(*files) is None
    assert all(path.stat().st_size < 3 << 20 for path in files)
    for path in files[:-1]:
        first = read(path)[0]
        assert isinstance(first, Header)
        assert path.name == f"journal-{first.time[:19].replace('-', '').replace(':', '')}Z-{first.sequence:012d}.jsonl"
    write(tmp_path, *(request(number, prompt=big) for number in range(4)), rotate_mb=1, keep=2)
    kept = journal_files([tmp_path])
    assert len(kept) == 3 and break_of(*kept) is None
    assert read(*kept)[-1].sequence == len(read(*kept)) + read(*kept)[0].sequence - 1


@pytest.mark.parametrize("tail", [b'{"kind":"request","sequ', b"\0" * 4096, b'{"kind"\0\0\0\n{"a":1}\n\0\0', b"{"])
def test_a_torn_end_is_cut_off_and_told_of(tmp_path: Path, tail: bytes) -> None:
    path = write(tmp_path, request(1))
    with path.open("ab") as file:
        file.write(tail)
    assert break_of(path) is not None
    write(tmp_path, request(2))
    files = journal_files([tmp_path])
    assert break_of(*files) is None
    recovered = read(*files)[2]
    assert kinds(*files) == ["header", "request", "recovered", "header", "request"]
    assert isinstance(recovered, Recovered) and recovered.bytes_cut == len(tail)


@pytest.mark.parametrize("size", [0, 1, 17, 60])
def test_a_torn_header_is_cut_off_too(tmp_path: Path, size: int) -> None:
    path = write(tmp_path, request(1))
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    write(tmp_path, request(2))
    files = journal_files([tmp_path])
    assert break_of(*files) is None
    assert kinds(*files) == ["header", "request", "header", *(["recovered"] if size else []), "request"]


def test_a_chain_goes_on_where_the_last_file_had_just_been_renamed(tmp_path: Path) -> None:
    write(tmp_path, request(1))
    write(tmp_path, request(2))
    (tmp_path / "journal.jsonl").unlink()
    write(tmp_path, request(3))
    assert [record.sequence for record in read(*journal_files([tmp_path]))] == [1, 2, 3, 4]


def test_a_changed_line_is_not_gone_on_from(tmp_path: Path) -> None:
    path = write(tmp_path, request(1), request(2))
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"id":2', b'"id":3'))
    with pytest.raises(DaemonError, match=r"journal\.path: the chain of .* is broken.*ull journal verify"):
        write(tmp_path)
    assert path.read_bytes() == data.replace(b'"id":2', b'"id":3')


def test_what_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious.txt"
    path.write_bytes(b"precious\n")
    with pytest.raises(DaemonError, match="is no journal"):
        write(path)
    assert path.read_bytes() == b"precious\n"
    with pytest.raises(DaemonError, match="is no file"):
        write(Path("/dev/full"))
    with pytest.raises(DaemonError, match=r"journal\.path: cannot write .*No such file"):
        write(tmp_path / "no/where/x.jsonl")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(DaemonError, match="is no file"):
        write(tmp_path / "link")
    assert not list(Path("/dev").glob("full?*.jsonl"))


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    file = JournalFile(JournalConfig(path=str(tmp_path)), header())
    with pytest.raises(DaemonError, match=f"written by another daemon .process {os.getpid()}"):
        write(tmp_path)
    file.close()
    write(tmp_path)


class Disk:
    """os.pwrite and os.fsync as they are on a disk that has `room` bytes left, and forgets what it fails to sync."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 30
        self.fails_to_sync = False
        self.writes = 0
        self._pwrite, self._fsync = os.pwrite, os.fsync
        patch.setattr(os, "pwrite", self.pwrite)
        patch.setattr(os, "fsync", self.fsync)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._pwrite(descriptor, bytes(data)[: self.room], offset)
        self.room -= written
        self.writes += 1
        return written

    def fsync(self, descriptor: int) -> None:
        if self.fails_to_sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("room", [0, 1, 500])
def test_what_finds_no_space_leaves_nothing_and_is_written_later(tmp_path: Path, disk: Disk, room: int) -> None:
    file = JournalFile(JournalConfig(path=str(tmp_path)), header())
    file.append([request(1)])
    before = file.path.read_bytes()
    disk.room = room
    with pytest.raises(OSError, match="No space left"):
        file.append([request(2), request(3)])
    assert file.path.read_bytes() == before and break_of(file.path) is None
    disk.room = 1 << 30
    file.append([request(2), request(3)])
    file.close()
    assert [record.sequence for record in read(file.path)] == [1, 2, 3, 4]


def test_a_new_file_that_finds_no_space_is_begun_later(tmp_path: Path, disk: Disk) -> None:
    file = JournalFile(JournalConfig(path=str(tmp_path), rotate_mb=1), header())
    file.append([request(1, prompt=list(range(200_000)))])
    disk.room = 100
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            file.append([request(2)])
    assert not file.path.exists()
    disk.room = 1 << 30
    file.append([request(2)])
    file.close()
    assert kinds(*journal_files([tmp_path])) == ["header", "request", "header", "request"]


def test_what_a_failed_sync_covered_is_written_again(tmp_path: Path, disk: Disk) -> None:
    file = JournalFile(JournalConfig(path=str(tmp_path)), header())
    file.append([request(1)])
    disk.fails_to_sync = True
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            file.sync()
    writes, disk.fails_to_sync = disk.writes, False
    file.sync()
    assert disk.writes == writes + 1 and not file.unsynced
    file.sync()
    assert disk.writes == writes + 1
    file.close()
    assert break_of(file.path) is None


def test_a_file_that_was_moved_away_is_followed_by_a_new_one(tmp_path: Path) -> None:
    file = JournalFile(JournalConfig(path=str(tmp_path)), header())
    file.append([request(1)])
    file.path.rename(tmp_path / "away.jsonl")
    file.append([request(2)])
    assert file.problem is not None and "moved away" in file.problem
    file.close()
    assert [record.sequence for record in read(tmp_path / "away.jsonl", file.path)] == [1, 2, 3, 4]


# ---- the queue ----------------------------------------------------------------------------------------------------


class SlowOutput(io.StringIO):
    """Lines come late here, so that a figure which is ahead of its line in the log is seen."""

    def write(self, text: str, /) -> int:
        time.sleep(0.02)
        return super().write(text)


class Writing:
    """A journal on a file, with requests that have ended."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.output = SlowOutput()
        given = JournalConfig(path=str(path), **config)
        self.file = JournalFile(given, header())
        self.journal = Journal(given, self.file, Log(form="json", stream=self.output))
        self.ended = 0

    def end(self, count: int = 1) -> None:
        for _ in range(count):
            self.ended += 1
            record = Ended(
                identity=b"me",
                id=self.ended,
                finish_reason="length",
                usage=Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0),
                timeline=Timeline(),
                seed=1,
            )
            self.journal.record(record, Turn(b"me", Generate(id=self.ended), 0, [], False), [])

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Waits for the journal's stats; fails after ten seconds."""
        waiting = threading.Event()
        for _ in range(2000):
            if condition(self.journal.stats()):
                return
            waiting.wait(0.005)
        raise AssertionError(f"the condition never held: {self.journal.stats()}")


@pytest.fixture
def writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Writing]]:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.01)
    made: list[Writing] = []

    def start(**config: Any) -> Writing:
        made.append(Writing(tmp_path, **config))
        return made[-1]

    yield start
    for each in made:
        each.journal.close(10)


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_every_record_is_written(writing: Callable[..., Writing], fsync: str) -> None:
    journal = writing(fsync=fsync)
    journal.end(300)
    journal.until(lambda stats: stats["records"] == 300)
    journal.journal.close(10)
    records = read(journal.file.path)
    assert [record.id for record in records if isinstance(record, Request)] == list(range(1, 301))
    assert (journal.file.syncs > 0) == (fsync != "never")


def test_what_must_be_recorded_is_refused_while_it_cannot_be(disk: Disk, writing: Callable[..., Writing]) -> None:
    journal = writing(required=True)
    journal.journal.check()
    disk.room = 700
    journal.end(5)  # which were accepted before
    journal.until(lambda stats: stats["failure"] is not None)
    with pytest.raises(JournalUnavailable, match="No space left on device"):
        journal.journal.check()
    journal.end(20)  # and these ran
    disk.room = 1 << 30
    journal.until(lambda stats: stats["records"] == 25)
    journal.until(lambda stats: stats["failure"] is None)
    journal.journal.check()
    assert break_of(journal.file.path) is None
    said = journal.output.getvalue()
    assert said.count("new requests are refused") == 1 and "can be written again" in said


def test_a_failing_sync_refuses_too(disk: Disk, writing: Callable[..., Writing]) -> None:
    journal = writing(required=True, fsync="always")
    disk.fails_to_sync = True
    journal.end()
    journal.until(lambda stats: stats["failure"] is not None)
    assert "Input/output error" in str(journal.journal.unavailable)
    disk.fails_to_sync = False
    journal.until(lambda stats: stats["failure"] is None)
    assert kinds(journal.file.path) == ["header", "request"]


def test_a_full_queue_refuses_what_must_be_recorded(
    disk: Disk, writing: Callable[..., Writing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_RECORDS", 4)
    stuck = threading.Event()
    monkeypatch.setattr(JournalFile, "append", _waiting(stuck, JournalFile.append))
    journal = writing(required=True)
    journal.end(4)
    with pytest.raises(JournalUnavailable, match="too many records wait"):
        journal.journal.check()
    stuck.set()
    journal.until(lambda stats: stats["records"] == 4)
    journal.journal.check()


def _waiting(event: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    def wait(*arguments: Any) -> Any:
        event.wait(20)
        return call(*arguments)

    return wait


def test_what_need_not_be_recorded_is_dropped_and_counted(
    disk: Disk, writing: Callable[..., Writing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_RECORDS", 4)
    monkeypatch.setattr(journal_module, "_SAY_LOSS_S", 1000.0)
    journal = writing()
    disk.room = 0
    journal.end(10)
    journal.journal.check()
    assert journal.journal.stats()["dropped"] == 6
    assert journal.journal.stats()["waiting"] == 4
    disk.room = 1 << 30
    journal.until(lambda stats: stats["records"] == 4)
    journal.end()
    journal.until(lambda stats: stats["records"] == 5)
    journal.journal.close(10)
    records = read(journal.file.path)
    assert kinds(journal.file.path) == ["header", *["request"] * 4, "dropped", "request"]
    assert isinstance(records[5], Dropped) and records[5].records == 6
    assert journal.output.getvalue().count("records of requests are dropped") == 1


def test_bytes_bound_the_queue_too(
    disk: Disk, writing: Callable[..., Writing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MOST_BYTES", 3 * journal_module._RECORD_BYTES)
    journal = writing()
    disk.room = 0
    journal.end(10)
    assert journal.journal.stats()["dropped"] == 7


def test_what_is_lost_at_the_end_is_said(disk: Disk, writing: Callable[..., Writing]) -> None:
    journal = writing()
    disk.room = 0
    journal.end(3)
    journal.journal.close(10)
    assert "3 records are lost at the end" in journal.output.getvalue()


# ---- the daemon ---------------------------------------------------------------------------------------------------

SLOW = {"round_ns": 2_000_000}


def requests_of(path: Path) -> list[Request]:
    return [record for record in read(*journal_files([path])) if isinstance(record, Request)]


def test_the_journal_has_what_clients_got(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "j").mkdir()
    daemon = spawn("--set", f"journal.path={tmp_path / 'j'}", "--set", "journal.fsync=always")
    results = []
    with Client(daemon.url) as client:
        digest = client.info().engine["digest"]
        results.append(client.generate("def main():\n", max_tokens=8, stop=["zzz"], logit_bias={5: 0.1}).result())
        results.append(client.generate([5, 6, 7], max_tokens=20, temperature=0.9, seed=2**63 + 5, top_p=0.9).result())
        with client.open_session() as session:
            results.append(session.append("hello world").result())
            results.append(session.generate(" foo", max_tokens=4).result())
            assert session.rollback(2)
            results.append(session.generate(" bar", max_tokens=4, ignore_eos=True).result())
        held = client.generate([9, 9], max_tokens=5, hold=True)
        while (engine := client.stats().engine)["running"] or engine["queue_length"]:
            client.poll(0.005)
        held.cancel()
        results.append(held.result())
        for options in ({"max_tokens": -1}, {"temperature": -1.0}):  # refused ones leave no record
            with pytest.raises(wire.RequestError):
                client.generate("x", **options).result()
    assert daemon.stop() == 0
    records = requests_of(tmp_path / "j")
    assert len(records) == len(results)
    for record, result in zip(records, results, strict=True):
        assert record.finish_reason == result.finish_reason
        assert record.completion[: len(result.token_ids)] == result.token_ids
        assert record.seed == result.seed and record.bundle == digest and record.parameters is not None
        assert (record.usage, record.timeline, record.speculation) == (
            result.usage,
            result.timeline,
            result.speculation,
        )
    assert [record.completion for record in records[:5]] == [result.token_ids for result in results[:5]]
    first, second, appended, answered, again, cancelled = records
    assert first.parameters is not None and first.parameters.stop == ["zzz"]
    assert first.parameters.logit_bias == {5: 0.1} and first.parameters.seed == first.seed
    assert second.prompt == [5, 6, 7] and second.seed == 2**63 + 5
    assert appended.prompt and appended.completion == [] and answered.session is not None and answered.prompt
    assert answered.prompt[: len(appended.prompt)] == appended.prompt
    assert again.prompt is not None
    kept = [*answered.prompt, *answered.completion][:-2]
    assert again.prompt[: len(kept)] == kept
    assert cancelled.finish_reason == "cancelled" and len(cancelled.completion) == 5  # which nobody has seen


def test_a_request_that_waits_for_its_session_is_recorded_without_prompt(spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn("--set", f"journal.path={tmp_path / 'j.jsonl'}", script=SLOW)
    with Client(daemon.url) as client, client.open_session() as session:
        talking = session.generate("x", max_tokens=900)
        waiting = session.generate("y", max_tokens=2)
        next(talking)
        waiting.cancel()
        assert waiting.result().finish_reason == "cancelled"
        talking.close()
    assert daemon.stop() == 0
    (waited, talked) = requests_of(tmp_path)
    assert (waited.prompt, waited.parameters) == (None, None)
    assert talked.prompt and talked.completion


def limit_files(daemon: Any, size: int) -> None:
    """From now on no file of the daemon's can grow beyond `size`."""
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def fill(client: Client) -> None:
    """The journal becomes longer than the log."""
    for _ in range(8):
        client.generate([7] * 900, max_tokens=1).result()


def until_journal(client: Client, condition: Callable[[dict[str, Any]], bool]) -> None:
    for _ in range(1000):
        if condition(client.stats().journal):
            return
        client.poll(0.02)
    raise AssertionError(f"the condition never held: {client.stats().journal}")


def test_a_full_disk_stops_new_requests_and_what_runs_ends(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    daemon = spawn("--set", f"journal.path={path}", "--set", "journal.required=true", script=SLOW)
    with Client(daemon.url) as client:
        fill(client)
        until_journal(client, lambda stats: stats["records"] == 8)
        running = client.generate("x", max_tokens=900)
        next(running)
        limit_files(daemon, path.stat().st_size)
        client.generate("y", max_tokens=1, priority="realtime").result()  # its record finds no room
        until_journal(client, lambda stats: stats["failure"] is not None)
        assert client.health().status == "journal_unavailable"
        with pytest.raises(JournalUnavailable, match="File too large") as refused:
            client.generate("z", max_tokens=1).result()
        assert refused.value.code == "journal_unavailable"
        assert client.tokenize("x")  # everything else is answered
        result = running.result()
        assert (result.finish_reason, len(result.token_ids)) == ("length", 900)
        limit_files(daemon, -1)
        until_journal(client, lambda stats: stats["failure"] is None and stats["records"] == 10)
        assert client.health().status == "ok"
        client.generate("z", max_tokens=1).result()
    assert daemon.stop() == 0
    assert [len(record.completion) for record in requests_of(tmp_path)] == [1] * 9 + [900, 1]


def test_a_full_disk_stops_nothing_where_no_record_is_required(spawn: Spawn, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    daemon = spawn("--set", f"journal.path={path}", script={})
    with Client(daemon.url) as client:
        fill(client)
        until_journal(client, lambda stats: stats["records"] == 8)
        limit_files(daemon, path.stat().st_size)
        for _ in range(3):
            client.generate("y", max_tokens=1).result()
        until_journal(client, lambda stats: stats["failure"] is not None)
        client.generate("y", max_tokens=1).result()
        assert client.health().status == "ok"
    assert daemon.stop() == 0
    assert "4 records are lost at the end" in daemon.events("journal")[-1]["message"]
    assert break_of(path) is None and len(requests_of(tmp_path)) == 8


def test_kill_in_the_middle_of_traffic(spawn: Spawn, tmp_path: Path) -> None:
    """What the journal then has is what clients got, and its chain goes on."""
    arguments = ("--set", f"journal.path={tmp_path / 'j.jsonl'}", "--set", "journal.fsync=always")
    daemon = spawn(*arguments, script={"round_ns": 100_000})
    got: dict[int, list[int]] = {}
    with Client(daemon.url, connect_timeout=20) as client:
        streams = [client.generate([number + 3] * 50, max_tokens=20) for number in range(30)]
        for stream in streams[:20]:
            got[stream.id] = stream.result().token_ids
        until_journal(client, lambda stats: stats["records"] >= len(streams))  # the last may have ended before others
        more = [client.generate([3] * 800, max_tokens=20) for _ in range(10)]
        next(more[0])
        daemon.kill()
    whole = break_of(tmp_path / "j.jsonl")
    assert whole is None or whole.what == "torn"
    again = spawn(*arguments, script={})
    with Client(again.url) as client:
        client.generate([8], max_tokens=1).result()
    assert again.stop() == 0
    records = {record.id: record for record in requests_of(tmp_path) if len(record.prompt or ()) == 50}
    assert set(got) <= set(records)
    assert all(records[key].completion == ids for key, ids in got.items())


def test_what_is_in_the_way_at_the_start(spawn: Spawn, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("precious\n")
    taken = ("--set", f"journal.path={tmp_path / 'j.jsonl'}")
    spawn(*taken, script={})
    for arguments, says in (
        (taken, "is written by another daemon (process "),
        (("--set", f"journal.path={tmp_path / 'no/j.jsonl'}"), "journal.path: cannot write"),
        (("--set", f"journal.path={tmp_path / 'precious.txt'}"), "is no journal"),
        (("--set", "journal.required=true"), "journal.required needs journal.path"),
        (("--set", "journal.fsync=often"), "must be one of always, interval, never"),
    ):
        outcome = ulld(str(tiny_bundle), "--listen", f"ipc://{tmp_path / 'u.sock'}", *arguments)
        assert (outcome.returncode, len(outcome.stderr.splitlines())) == (1, 1)
        assert says in outcome.stderr


def test_every_figure_of_the_journal_stands_in_the_page(spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn("--set", f"journal.path={tmp_path / 'j.jsonl'}", script={})
    with Client(daemon.url) as client:
        figures = client.stats().journal
    page = (Path(__file__).parents[2] / "docs/wire.md").read_text()
    table = page[page.index("\n`journal`:\n") :].partition("A thread of `threads`")[0]
    assert all(f"`{name}`" in table for name in figures)
    assert figures["sequence"] == 1 and len(figures["head"]) == 64
