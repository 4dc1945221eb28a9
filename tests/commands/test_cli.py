"""The command `ull`: what it prints, to whom, and with which exit status."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT, Daemon, Spawn
from fake_daemon import FakeDaemon, done, token, words
from processes import ull
from ull import _native, cli, wire
from ull.bundle import open_bundle
from ull.client import Client
from ull.client.benchmark import Load, measure, quantiles
from ull.commands import bench, demo
from ull.commands.outcome import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_READER, EXIT_TIMED_OUT
from ull.daemon.config import Config, parse_config
from ull.spawn import python_command, python_environment
from ull.text.tokenizer import Tokenizer

PROMPT = "def main():\n"


@pytest.fixture
def words_url(tmp_path: Path) -> Iterator[str]:
    """A scripted daemon that answers with the prompt's words."""
    with FakeDaemon(f"ipc://{tmp_path / 'ull.sock'}", words) as daemon:
        yield daemon.url


def test_generate_streams_text(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        expected = client.generate(PROMPT, max_tokens=24).result()
    outcome = ull("generate", PROMPT, "--connect", shared_daemon.url, "--max-tokens", "24")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout == expected.text + ("" if expected.text.endswith("\n") else "\n")
    outcome = ull("generate", "-", "--connect", shared_daemon.url, "--max-tokens", "24", "--ids", stdin=PROMPT)
    assert [int(line) for line in outcome.stdout.split()] == expected.token_ids


def test_generate_json(shared_daemon: Daemon) -> None:
    outcome = ull("generate", PROMPT, "--connect", shared_daemon.url, "--max-tokens", "3", "--json", "--logprobs", "1")
    result = json.loads(outcome.stdout)
    assert (result["finish_reason"], len(result["token_ids"]), len(result["logprobs"])) == ("length", 3, 3)
    assert result["usage"]["completion_tokens"] == 3
    assert result["timeline"]["received_ns"] > 0


def test_sampling_options_reach_the_wire(words_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 3 --stop A --stop B --timeout 2 --ignore-eos"
    assert cli.main(["generate", "one two", "--connect", words_url, *sampling.split()]) == 0
    assert capsys.readouterr().out == "one two \n"


@pytest.mark.parametrize("where", ["daemon", "bundle"])
def test_tokenize_and_detokenize(shared_daemon: Daemon, tiny_bundle: Path, where: str) -> None:
    place = ("--connect", shared_daemon.url) if where == "daemon" else ("--bundle", str(tiny_bundle))
    expected = Tokenizer(open_bundle(tiny_bundle).tokenizer_directory).encode(PROMPT)
    outcome = ull("tokenize", PROMPT, *place)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    ids = outcome.stdout.split()
    assert [int(word) for word in ids] == expected
    assert ull("tokenize", "-", "--count", *place, stdin=PROMPT).stdout == f"{len(ids)}\n"
    assert ull("tokenize", PROMPT, "--no-special-tokens", *place).stdout.split() == ids[1:]  # without BOS
    assert ull("detokenize", *ids, *place).stdout == PROMPT
    assert ull("detokenize", "-", *place, stdin=" ".join(ids)).stdout == PROMPT
    assert ull("detokenize", *ids, "--special-tokens", *place).stdout.endswith(">" + PROMPT)
    chat = ull("tokenize", "--messages", '[{"role": "user", "content": "Hi"}]', *place)
    assert len(chat.stdout.split()) > 3
    for arguments, says in (
        (("detokenize", "5", "x"), "ids are integers"),
        (("detokenize", "1000000"), "outside the vocabulary"),
        (("tokenize", ""), "prompt is empty"),
        (("tokenize", "--messages", "[1]"), "--messages takes a JSON list"),
    ):
        outcome = ull(*arguments, *place)
        assert (outcome.returncode, len(outcome.stderr.splitlines())) == (1, 1)
        assert says in outcome.stderr


def test_refusals_are_one_line(shared_daemon: Daemon) -> None:
    outcome = ull("generate", PROMPT, "--connect", shared_daemon.url, "--temperature", "-1")
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert outcome.stderr == "ull: temperature must be 0 (greedy) or from 0.0001 to 100, not -1.0\n"


def test_nobody_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ull.client.sync.CONNECT_TIMEOUT_S", 0.05)
    for command in (["generate", "x"], ["health"], ["info"], ["stats"], ["bench"], ["chat"]):
        assert cli.main([*command, "--connect", f"ipc://{tmp_path / 'none'}"]) == 1
        complaint = capsys.readouterr().err
        assert complaint.count("\n") == 1 and "is ulld running?" in complaint
    assert cli.main(["health", "--connect", "nonsense"]) == 1
    assert "neither ipc:///path nor tcp://" in capsys.readouterr().err


def test_ctrl_c_cancels(spawn: Spawn) -> None:
    daemon = spawn(script={"round_ns": 5_000_000})
    process = subprocess.Popen(
        [*python_command("ull.cli"), "generate", "x", "--connect", daemon.url, "--max-tokens", "1000", "--ids"],
        env=python_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=20)
    assert (process.returncode, complaint) == (130, "")
    assert daemon.wait_events("request", 1)[0]["finish"] == "cancelled"


def test_a_closed_pipe_is_no_drama(shared_daemon: Daemon) -> None:
    command = [*python_command("ull.cli"), "generate", PROMPT, "--connect", shared_daemon.url, "--ignore-eos"]
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [*command, "--max-tokens", "900"], env=python_environment(), stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(20) == EXIT_NO_READER
    process.stderr.close()


def into(output: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs ull with that descriptor as its standard output."""
    command = [*python_command("ull.cli"), *arguments]
    environment = {
        **python_environment(),
        "PYTHONUNBUFFERED": "",
    }  # argparse would not say that it cannot print the help
    return subprocess.run(
        command, env=environment, stdout=output, stderr=subprocess.PIPE, text=True, timeout=100, check=False
    )


def commands(url: str, bundle: Path) -> list[list[str]]:
    """One of each that prints."""
    there = ["--connect", url]
    return [
        ["generate", PROMPT, "--max-tokens", "8", *there],
        ["generate", PROMPT, "--max-tokens", "8", "--json", *there],
        ["generate", PROMPT, "--max-tokens", "8", "--ids", *there],
        ["bench", "--requests", "1", "--warmup", "0", "--max-tokens", "2", *there],
        ["bench", "--requests", "1", "--warmup", "0", "--max-tokens", "2", "--json", *there],
        ["health", *there],
        ["info", *there],
        ["stats", *there],
        ["inspect", str(bundle)],
        ["inspect", str(bundle), "--json"],
        ["config", "--defaults"],
        ["--help"],
    ]


def test_a_full_disk_is_one_line(shared_daemon: Daemon, tiny_bundle: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        for command in commands(shared_daemon.url, tiny_bundle):
            outcome = into(full.fileno(), *command)
            assert outcome.stderr == "ull: cannot write the output: No space left on device\n", command
            assert outcome.returncode == 1, command


def test_a_reader_that_has_gone_is_no_drama(shared_daemon: Daemon, tiny_bundle: Path) -> None:
    for command in commands(shared_daemon.url, tiny_bundle):
        reading, writing = os.pipe()
        os.close(reading)
        outcome = into(writing, *command)
        os.close(writing)
        assert (outcome.returncode, outcome.stderr) == (EXIT_NO_READER, ""), command


def test_streams_that_are_closed_stop_nothing(shared_daemon: Daemon) -> None:
    command = " ".join([*python_command("ull.cli"), "health", "--connect", shared_daemon.url])
    for redirection in (">&-", "2>&-", ">&- 2>&- <&-"):
        outcome = subprocess.run(
            ["sh", "-c", f"{command} {redirection}"], env=python_environment(), capture_output=True, check=False
        )
        assert (outcome.returncode, outcome.stderr) == (0, b""), redirection


def test_little_is_imported_before_an_interrupt_is_heard() -> None:
    late = ["msgspec", "rich", "ull.commands", "zmq"]
    program = f"import ull.cli, sys; print([name for name in {late} if name in sys.modules])"
    outcome = subprocess.run(
        [sys.executable, "-P", "-c", program], env=python_environment(), capture_output=True, text=True, check=True
    )
    assert outcome.stdout == "[]\n"


def test_an_answer_that_took_too_long_is_no_success(spawn: Spawn) -> None:
    daemon = spawn(script={"round_ns": 20_000_000})
    command = ["generate", "x", "--connect", daemon.url, "--max-tokens", "3000", "--timeout", "0.2", "--ids"]
    outcome = ull(*command)
    assert outcome.returncode == EXIT_TIMED_OUT
    tokens = len(outcome.stdout.split())
    assert outcome.stderr == f"ull: timed out after 0.2 s: the answer ends after {tokens} tokens\n"
    outcome = ull(*command, "--json")
    assert (outcome.returncode, json.loads(outcome.stdout)["finish_reason"]) == (EXIT_TIMED_OUT, "timeout")
    assert outcome.stderr.startswith("ull: timed out after 0.2 s")
    outcome = ull("chat", "--connect", daemon.url, "--max-tokens", "3000", "--timeout", "0.2", stdin="hello\n")
    assert (outcome.returncode, outcome.stderr) == (0, "(timed out after 0.2 s)\n")


def test_an_answer_that_misses_its_deadline_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def late(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if not isinstance(request, wire.Generate):
            words(daemon, identity, request)
            return
        assert (request.deadline_ms, request.priority) == (200, "realtime")
        daemon.send(identity, token(request.id, 0, "so far"), done(request.id, 1, "deadline"))

    with FakeDaemon(f"ipc://{tmp_path / 'ull.sock'}", late) as daemon:
        options = ["--connect", daemon.url, "--deadline", "0.2", "--priority", "realtime"]
        assert cli.main(["generate", "x", *options]) == EXIT_TIMED_OUT
        said = "ull: not done by its deadline of 0.2 s: the answer ends after 1 tokens\n"
        assert capsys.readouterr() == ("so far\n", said)
        outcome = ull("chat", *options, stdin="hello\n")
        assert (outcome.returncode, outcome.stderr) == (0, "(not done by its deadline of 0.2 s)\n")


def test_the_statuses_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    explained = re.findall(r"^  (\d+) ", capsys.readouterr().out, re.MULTILINE)
    statuses = [0, EXIT_FAILED, 2, EXIT_TIMED_OUT, EXIT_INTERRUPTED, EXIT_NO_READER]
    assert list(map(int, explained)) == statuses
    table = (ROOT / "docs/clients.md").read_text().partition("| Status of `ull` |")[2].partition("\n\n")[0]
    assert list(map(int, re.findall(r"^\| (\d+) \|", table, re.MULTILINE))) == statuses


def test_logprobs_are_printed_beside_the_text(shared_daemon: Daemon) -> None:
    asked = ["generate", PROMPT, "--connect", shared_daemon.url, "--max-tokens", "3", "--logprobs", "2"]
    result = json.loads(ull(*asked, "--json").stdout)
    outcome = ull(*asked)
    assert (outcome.returncode, outcome.stdout.rstrip("\n")) == (0, result["text"].rstrip("\n"))
    lines = outcome.stderr.splitlines()[1:]
    assert [int(line.split()[0]) for line in lines] == result["token_ids"]
    for line, entry in zip(lines, result["logprobs"], strict=True):
        numbers = [entry["logprob"], *(number for pair in entry["top"] for number in pair)]
        assert [float(word) for word in line.split()[1:]] == pytest.approx(numbers, abs=1e-4)


def test_status_commands(shared_daemon: Daemon) -> None:
    outcome = ull("health", "--connect", shared_daemon.url)
    assert (outcome.returncode, json.loads(outcome.stdout)["status"]) == (0, "ok")
    assert json.loads(ull("info", "--connect", shared_daemon.url).stdout)["limits"]["context"] == 1024
    assert "requests" in json.loads(ull("stats", "--connect", shared_daemon.url).stdout)


def test_config_defaults_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--defaults"]) == 0
    printed = capsys.readouterr().out
    assert parse_config(printed) == Config()
    path = tmp_path / "ulld.toml"
    path.write_text(printed)
    assert cli.main(["config", "--check", str(path)]) == 0
    path.write_text("lisen = []")
    assert cli.main(["config", "--check", str(path)]) == 1
    assert "did you mean listen?" in capsys.readouterr().err


def test_inspect_measures(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tiny_bundle), "--measure", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "tokens verified at once" in out and "drafting one, medusa" in out and "1 thread" in out
    assert cli.main(["inspect", str(tiny_bundle), "--measure", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert list(measured["verify_ns"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert measured["draft_ns"].keys() == {"suffix", "medusa", "eagle", "dflash", "draft"}
    assert measured["weight_bytes"] > measured["drafter_weight_bytes"] > 0


def test_inspect_of_a_daemon(shared_daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", shared_daemon.url]) == 0
    out = capsys.readouterr().out
    assert "tokens verified at once" in out and "drafting one, draft" in out
    assert "where it pays" in out
    assert shared_daemon.url in "".join(out.split()), "a title is as wide as its table: a long path goes on below"
    assert cli.main(["inspect", shared_daemon.url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["executor"]["verify_ns"]["64"] > 0 and report["engine"]["name"] == "tiny"
    for option in ("--measure", "--verify"):
        assert cli.main(["inspect", shared_daemon.url, option]) == 1
        assert "takes a bundle" in capsys.readouterr().err


def test_inspect(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tiny_bundle)]) == 0
    assert "llama" in capsys.readouterr().out
    assert cli.main(["inspect", str(tiny_bundle), "--json", "--verify"]) == 0
    assert json.loads(capsys.readouterr().out)["error"] is None
    assert cli.main(["inspect", str(tmp_path / "none.ull")]) == 1


def test_usage_errors() -> None:
    for arguments in ([], ["sing"], ["generate"], ["config"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2


# ---- chat ---------------------------------------------------------------------------------------------------------


def test_chat_remembers_its_turns(tmp_path: Path) -> None:
    def answer(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Generate):
            request.prompt = f"answer {len(request.messages or ())}"
        words(daemon, identity, request)

    with FakeDaemon(f"ipc://{tmp_path / 'ull.sock'}", answer) as daemon:
        outcome = ull("chat", "--connect", daemon.url, "--system", "be kind", stdin="one\n\ntwo\n")
        assert outcome.returncode == 0
        assert outcome.stdout.splitlines() == ["answer 2 ", "answer 4 ", ""]
        _, last = daemon.wait_for(wire.Generate, 2)
        turns = [(message.role, message.content) for message in last.messages or ()]
        assert turns == [("system", "be kind"), ("user", "one"), ("assistant", "answer 2 "), ("user", "two")]


def test_chat_holds_one_session(tmp_path: Path) -> None:
    with FakeDaemon(f"ipc://{tmp_path / 'ull.sock'}", words) as daemon:
        assert ull("chat", "--connect", daemon.url, stdin="one\ntwo\n").returncode == 0
        (opened,) = daemon.wait_for(wire.OpenSession)
        daemon.wait_for(wire.CloseSession)
        assert isinstance(opened, wire.OpenSession)
        turns = daemon.wait_for(wire.Generate, 2)
        assert [request.session for request in turns] == [opened.session] * 2  # type: ignore[union-attr]


def test_chat_forgets_the_oldest_turn_when_the_context_is_full(tmp_path: Path) -> None:
    def answer(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        if isinstance(request, wire.Generate):
            if len(request.messages or ()) > 3:
                daemon.send(identity, wire.Error(id=request.id, code="too_long", message="too long", field="messages"))
                return
            request.prompt = "fine"
        words(daemon, identity, request)

    with FakeDaemon(f"ipc://{tmp_path / 'ull.sock'}", answer) as daemon:
        outcome = ull("chat", "--connect", daemon.url, stdin="one\ntwo\nthree\n")
        assert outcome.stdout.splitlines() == ["fine "] * 3 + [""]
        assert outcome.stderr.count("its oldest turn is forgotten") == 1
        last = daemon.wait_for(wire.Generate, 4)[-1]
        assert [message.content for message in last.messages or ()] == ["two", "fine ", "three"]


def test_chat_with_the_tiny_engine(shared_daemon: Daemon) -> None:
    outcome = ull("chat", "--connect", shared_daemon.url, "--max-tokens", "8", stdin="write a loop\nagain\n")
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_ctrl_c_in_a_chat_cancels_the_answer_then_quits(spawn: Spawn) -> None:
    daemon = spawn(script={"round_ns": 5_000_000})
    terminal, child = pty.openpty()
    process = subprocess.Popen(
        [*python_command("ull.cli"), "chat", "--connect", daemon.url, "--max-tokens", "900"],
        env={**python_environment(), "TERM": "dumb"},
        stdin=child,
        stdout=child,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    os.close(child)

    seen = bytearray()

    def read_until(text: bytes) -> None:
        while text not in seen:
            seen.extend(os.read(terminal, 1024))
        del seen[: seen.index(text) + len(text)]

    with Client(daemon.url) as client:
        read_until(b"> ")
        os.write(terminal, b"hello\n")
        while client.stats().engine["completion_tokens"] == 0:
            pass
        process.send_signal(signal.SIGINT)
        read_until(b"(cancelled)")
        read_until(b"> ")
        process.send_signal(signal.SIGINT)
        # Python sees a signal that comes between readline's prompt and its wait for a key with the next key only.
        os.write(terminal, b"\n")
        assert process.wait(20) == 0
    os.close(terminal)
    assert daemon.wait_events("request", 1)[0]["finish"] == "cancelled"


# ---- bench --------------------------------------------------------------------------------------------------------


def test_bench_closed_loop(shared_daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    outcome = ull(
        *("bench", "--connect", shared_daemon.url, "--requests", "12", "--warmup", "1"),
        *("--max-tokens", "8", "--concurrency", "3", "--json", str(path)),
    )
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert "TTFT" in outcome.stdout and "tokens/s" in outcome.stdout
    report = json.loads(path.read_text())
    summary = report["summary"]
    assert (summary["requests"], summary["refused"], summary["tokens"]) == (12, 0, 96)
    for metric in ("time_to_first_token_us", "inter_token_us", "inter_chunk_us", "end_to_end_us"):
        values = [summary[metric][name] for name in ("p50", "p90", "p99", "p99.9", "max")]
        assert values == sorted(values) and values[0] >= 0
    # Of all the gaps some may be nothing: where the client is slow, several rounds come in one frame.
    assert summary["time_to_first_token_us"]["p50"] > 0 and summary["end_to_end_us"]["p50"] > 0
    assert "send_delay_us" not in summary
    assert report["environment"]["engine"] == "tiny"


def test_bench_open_loop(shared_daemon: Daemon) -> None:
    arguments = ["--requests", "10", "--max-tokens", "4", "--rate", "100", "--prompt-tokens", "20", "--json"]
    report = json.loads(ull("bench", "--connect", shared_daemon.url, *arguments).stdout)
    assert report["summary"]["requests"] == 10
    assert report["summary"]["send_delay_us"]["max"] >= 0
    assert report["load"]["rate"] == 100


def test_open_loop_latency_counts_from_the_planned_time(spawn: Spawn) -> None:
    # One request takes 20 ms and they are planned 1 ms apart: the queue's wait belongs to the latency.
    daemon = spawn(script={"round_ns": 5_000_000})
    with Client(daemon.url) as client:
        load = Load(prompt=[5], max_tokens=4, requests=20, warmup=0, rate=1000, poisson=False)
        samples = measure(client, load)
    assert samples.requests == 20
    assert samples.end_to_end[-1] > 15 * 20_000_000


def test_bench_counts_refusals(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.queue_depth=1", script={"round_ns": 20_000_000})
    with Client(daemon.url) as client:
        samples = measure(client, Load(prompt=[5], max_tokens=20, requests=8, warmup=0, concurrency=8))
    assert samples.requests + samples.refused == 8
    assert samples.refused >= 5


def test_bench_with_a_deadline_that_everybody_meets(shared_daemon: Daemon) -> None:
    arguments = [
        "--requests",
        "6",
        "--warmup",
        "1",
        "--max-tokens",
        "4",
        "--deadline",
        "3600000",
        "--priority",
        "batch",
    ]
    report = json.loads(ull("bench", "--connect", shared_daemon.url, *arguments, "--json").stdout)
    assert (report["load"]["deadline_ms"], report["load"]["priority"]) == (3_600_000, "batch")
    punctual = report["summary"]["deadline"]
    assert (punctual["accepted"], punctual["hit_rate"], punctual["unreachable"]) == (6, 1.0, 0)
    shown = ull("bench", "--connect", shared_daemon.url, *arguments).stdout
    assert "deadline met by 6 of 6 accepted requests (100.00%); 0 refused as unreachable" in shown


def test_bench_counts_deadlines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int | None] = []

    def answer(daemon: FakeDaemon, identity: bytes, request: wire.Request) -> None:
        assert isinstance(request, wire.Generate)
        asked.append(request.deadline_ms)
        kind = len(asked) % 4
        if kind == 1 and request.deadline_ms is not None:
            daemon.send(identity, wire.Error(id=request.id, code="deadline_unreachable", message="", expected_ms=9.5))
            return
        end = done(request.id, 0, "deadline" if kind == 2 else "length")
        took_ns = 9_000_000 if kind == 3 else 1_000_000
        end.timeline = wire.Timeline(received_ns=1, done_ns=1 + took_ns)
        if kind == 0:
            end.timeline.first_token_ns, end.timeline.expected_first_ns = 500_000, 520_000
            end.timeline.expected_done_ns = end.timeline.done_ns - 300_000
        daemon.send(identity, end)

    with FakeDaemon(f"ipc://{tmp_path / 'ull.sock'}", answer) as daemon, Client(daemon.url) as client:
        samples = measure(client, Load(prompt="x", requests=8, warmup=4, deadline=0.005))
    assert asked == [None] * 4 + [5] * 8
    summary = samples.summary()
    assert (summary["requests"], summary["refused"]) == (6, 2)
    punctual = summary["deadline"]
    assert (punctual["accepted"], punctual["on_time"], punctual["unreachable"]) == (6, 2, 2)
    assert punctual["hit_rate"] == pytest.approx(1 / 3)
    assert (punctual["first_token_error_us"]["p50"], punctual["done_error_us"]["p99"]) == (20, 300)
    bench.print_table(summary, "x")
    shown = capsys.readouterr().out
    assert "deadline met by 2 of 6 accepted requests (33.33%); 2 refused as unreachable" in shown
    assert "end predicted off by" in shown


def test_bench_refuses_a_place_that_cannot_be_written_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "Client", None)  # not even asked for
    for place, why in ((tmp_path / "none/x", "No such file or directory"), (tmp_path, "Is a directory")):
        assert cli.main(["bench", "--json", str(place)]) == 1
        assert capsys.readouterr() == ("", f"ull: --json: cannot write {place}: {why}\n")


def test_bench_keeps_a_report_until_there_is_a_new_one(shared_daemon: Daemon, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("x" * 100_000)
    for path in (old, new):
        assert cli.main(["bench", "--connect", shared_daemon.url, "--temperature", "-1", "--json", str(path)]) == 1
    assert old.read_text() == "x" * 100_000 and not new.exists()
    load = ["--requests", "1", "--warmup", "0", "--max-tokens", "2"]
    assert cli.main(["bench", "--connect", shared_daemon.url, *load, "--json", str(old)]) == 0
    assert json.loads(old.read_text())["summary"]["requests"] == 1


def test_bench_says_that_the_report_did_not_fit(shared_daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "1", "--warmup", "0", "--max-tokens", "2"]
    assert cli.main(["bench", "--connect", shared_daemon.url, *load, "--json", "/dev/full"]) == 1
    assert capsys.readouterr().err == "ull: --json: cannot write /dev/full: No space left on device\n"


def test_bench_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["--requests", "0"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--concurrency", "0"],
        ["--deadline", "0"],
    ):
        assert cli.main(["bench", *arguments]) == 1
        assert capsys.readouterr().err.startswith("ull: --")


def test_quantiles_are_nearest_ranks() -> None:
    assert quantiles([5000]) == {"p50": 5, "p90": 5, "p99": 5, "p99.9": 5, "max": 5}
    assert quantiles([index * 1000 for index in range(1, 1001)]) == {
        "p50": 500,
        "p90": 900,
        "p99": 990,
        "p99.9": 999,
        "max": 1000,
    }


# ---- demo ---------------------------------------------------------------------------------------------------------


def test_demo_builds_serves_measures_and_stops(tmp_path: Path) -> None:
    recipe, output = str(ROOT / "engines/tiny.toml"), tmp_path / "tiny.ull"
    first = ull("demo", "--recipe", recipe, "--output", str(output))
    assert first.returncode == 0, first.stderr
    assert "building it" in first.stdout and "TTFT" in first.stdout and "tokens/s" in first.stdout
    assert demo.PROMPT in first.stdout
    assert "ulld exited with status 0" in first.stdout
    second = ull("demo", "--recipe", recipe, "--output", str(output))
    assert second.returncode == 0, second.stderr
    assert "up to date" in second.stdout and "building it" not in second.stdout


def test_demo_outside_the_repository(tmp_path: Path) -> None:
    outcome = ull("demo", "--recipe", str(tmp_path / "none.toml"))
    assert (outcome.returncode, outcome.stderr.count("\n")) == (1, 1)


def test_the_entry_points_exist() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert (scripts["ull"], scripts["ulld"]) == ("ull.cli:main", "ull.daemon.__main__:main")
    assert sys.modules["ull.cli"].main is cli.main


def test_inspect_says_what_memory_a_daemon_takes(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tiny_bundle), "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory_bytes"]
    parts = [size for name, size in memory.items() if name != "total"]
    assert memory["total"] % 2**20 == 0 and sum(parts) < memory["total"] < 1.2 * sum(parts)
    executor = _native.CpuExecutor(open_bundle(tiny_bundle).native_spec(), threads=1, cores=[])
    _native.Engine(executor, str(open_bundle(tiny_bundle).vocabulary_path))
    assert memory["weights"] == pytest.approx(executor.weight_bytes, rel=0.02)
    assert memory["kv"] == pytest.approx(executor.kv_bytes, rel=0.1)
    assert cli.main(["inspect", str(tiny_bundle)]) == 0
    assert f"{memory['total'] // 2**20}M" in capsys.readouterr().out
