"""The daemon from outside: what it answers, how it starts, drains, stops and fails."""

import asyncio
import os
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import pytest
import zmq

import ull
from conftest import Daemon, Spawn
from processes import ulld
from ull import wire
from ull.bundle import open_bundle
from ull.client.sync import Client
from ull.text.tokenizer import Tokenizer

# Rounds of five milliseconds: a request of the whole context takes five seconds unless something ends it.
SLOW = {"round_ns": 5_000_000}
PROMPT = "def main():\n"


def wait_for_status(client: Client, status: str) -> None:
    """Asks until the daemon says `status`; fails after 20 seconds."""
    deadline = time.monotonic() + 20
    while client.health().status != status:
        assert time.monotonic() < deadline, f"the daemon never said {status}"
        time.sleep(0.01)


# ---- answers ------------------------------------------------------------------------------------------------------


def test_a_completion_s_frames_add_up(shared_daemon: Daemon, tiny_bundle: Path) -> None:
    tokenizer = Tokenizer(open_bundle(tiny_bundle).tokenizer_directory)
    with Client(shared_daemon.url) as client:
        before_ns = time.monotonic_ns()
        stream = client.generate(PROMPT, max_tokens=48, ignore_eos=True)
        frames = list(stream)
        result = stream.result()
    ids = [token for frame in frames for token in frame.ids]
    assert ids == result.token_ids
    assert "".join(frame.text for frame in frames) == result.text
    assert result.text == tokenizer.decode(ids)
    starts = [frame.index for frame in frames]
    assert starts == [sum(len(frame.ids) for frame in frames[:index]) for index in range(len(frames))]
    assert (result.finish_reason, result.usage.completion_tokens, len(ids)) == ("length", 48, 48)
    assert result.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    times = result.timeline
    stamps = [before_ns, times.received_ns, times.admitted_ns, times.started_ns, times.prefilled_ns]
    stamps += [times.first_token_ns, times.last_token_ns, times.done_ns, time.monotonic_ns()]
    assert stamps == sorted(stamps)
    assert frames[0].time_ns == times.first_token_ns
    assert all(frame.time_ns <= frame.received_ns for frame in frames)


def test_prompt_messages_and_ids_are_the_same_thing(shared_daemon: Daemon, tiny_bundle: Path) -> None:
    tokenizer = Tokenizer(open_bundle(tiny_bundle).tokenizer_directory)
    with Client(shared_daemon.url) as client:
        from_text = client.generate(PROMPT, max_tokens=8).result()
        from_ids = client.generate(tokenizer.encode(PROMPT), max_tokens=8).result()
        assert from_text.token_ids == from_ids.token_ids
        messages = [wire.Message(role="user", content="write a loop")]
        from_chat = client.generate([{"role": "user", "content": "write a loop"}], max_tokens=8).result()
        ids = tokenizer.encode_chat(tokenizer.render(messages))
        assert from_chat.token_ids == client.generate(ids, max_tokens=8).result().token_ids
        assert from_chat.usage.prompt_tokens == len(ids)


def test_same_seed_same_tokens_alone_or_queued(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client, Client(shared_daemon.url) as other:
        alone = [client.generate(PROMPT, max_tokens=32, temperature=1.0, seed=seed).result() for seed in range(4)]
        crowd = [other.generate(f"class C{index}:", max_tokens=16, temperature=1.0) for index in range(4)]
        queued = [client.generate(PROMPT, max_tokens=32, temperature=1.0, seed=seed) for seed in range(4)]
        assert [stream.result().token_ids for stream in queued] == [result.token_ids for result in alone]
        assert len({tuple(result.token_ids) for result in alone}) > 1
        assert len({stream.result().seed for stream in crowd}) == 4


def test_a_drawn_seed_reproduces_the_request(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        first = client.generate(PROMPT, max_tokens=24, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01).result()
        again = client.generate(
            PROMPT, max_tokens=24, temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=first.seed
        ).result()
    assert again.token_ids == first.token_ids


def test_stop_texts_are_not_part_of_the_text(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        full = client.generate(PROMPT, max_tokens=48, ignore_eos=True).result().text
        stop = full[len(full) // 2 : len(full) // 2 + 4]
        cut = client.generate(PROMPT, max_tokens=48, ignore_eos=True, stop=stop).result()
    assert cut.finish_reason == "stop"
    assert cut.text == full[: full.index(stop)]


def test_stop_ids_are_counted_but_have_no_text(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        full = client.generate(PROMPT, max_tokens=16, ignore_eos=True).result()
        last = full.token_ids[9]
        cut = client.generate(PROMPT, max_tokens=16, ignore_eos=True, stop_ids=[last]).result()
    end = full.token_ids.index(last) + 1
    assert (cut.finish_reason, cut.token_ids, cut.usage.completion_tokens) == ("stop", full.token_ids[:end], end)
    assert full.text.startswith(cut.text) and cut.text != full.text


def test_a_banned_token_does_not_come(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        first = client.generate(PROMPT, max_tokens=1).result().token_ids[0]
        other = client.generate(PROMPT, max_tokens=1, logit_bias={first: float("-inf")}).result().token_ids[0]
        forced = client.generate(PROMPT, max_tokens=1, logit_bias={77: 1000.0}).result().token_ids
    assert other != first
    assert forced == [77]


def test_logprobs(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        result = client.generate(PROMPT, max_tokens=6, logprobs=3).result()
        chosen_only = client.generate(PROMPT, max_tokens=2, logprobs=0).result()
    assert result.logprobs is not None and chosen_only.logprobs is not None
    assert [entry.token for entry in result.logprobs] == result.token_ids
    for entry in result.logprobs:
        values = [logprob for _, logprob in entry.top]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert (entry.token, entry.logprob) == entry.top[0]  # greedy: the chosen token leads
        assert sum(2.718281828**value for value in values) <= 1.0001
    assert [entry.top for entry in chosen_only.logprobs] == [[], []]


def test_the_context_s_end_is_a_length_stop(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        result = client.generate([100] * 1020, max_tokens=100, ignore_eos=True).result()
    assert (result.finish_reason, result.usage.completion_tokens) == ("length", 4)


def test_the_next_turn_finds_its_prefix_cached(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        ids = [200 + index % 50 for index in range(300)]
        first = client.generate(ids, max_tokens=8, ignore_eos=True).result()
        second = client.generate(ids + first.token_ids, max_tokens=8, ignore_eos=True).result()
    assert second.usage.cached_tokens >= 300
    assert second.usage.prompt_tokens == 308


def test_queries(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client:
        client.generate(PROMPT, max_tokens=4).result()
        health, info, stats = client.health(), client.info(), client.stats()
        deadline = time.monotonic() + 20
        while stats.engine["completion_tokens"] < 4 or stats.io["done_frames"] < 1:  # published after the answer
            assert time.monotonic() < deadline, stats
            time.sleep(0.01)
            stats = client.stats()
    assert (health.status, health.queue_length) == ("ok", 0)
    assert health.uptime_ns > 0
    assert (info.engine["name"], info.engine["architecture"], info.engine["chat_template"]) == ("tiny", "llama", True)
    assert info.executor["name"].startswith("cpu/")
    assert info.executor["weight_bytes"] > 5_000_000
    assert (info.limits["context"], info.limits["vocabulary"]) == (1024, 4096)
    assert stats.requests["accepted"] >= 1
    assert stats.latency["time_to_first_token"]["count"] >= 1
    for name in ("engine", "io", "control"):  # each has had something to do, and each but the last has slept since
        duty = stats.threads[name]
        assert duty["cycles"] > 0 and duty["working_ns"] > 0 and duty["longest_ns"] > 0, (name, duty)
        assert duty.get("sleeps", 1) > 0, (name, duty)


def test_the_async_client(shared_daemon: Daemon) -> None:
    async def main() -> None:
        async with ull.AsyncClient(shared_daemon.url) as client:
            stream = client.generate(PROMPT, max_tokens=12)
            texts = [token.text async for token in stream]
            result = await stream.result()
            assert "".join(texts) == result.text
            results = await asyncio.gather(*(client.generate(PROMPT, max_tokens=12).result() for _ in range(8)))
            assert {tuple(item.token_ids) for item in results} == {tuple(result.token_ids)}
            assert (await client.health()).status == "ok"

    asyncio.run(main())


def test_one_log_line_per_request_with_its_figures(spawn: Spawn) -> None:
    daemon = spawn()
    with Client(daemon.url) as client:
        result = client.generate(PROMPT, max_tokens=5, seed=3).result()
        with pytest.raises(ull.RequestError):
            client.generate("").result()
    (line,) = daemon.wait_events("request", 1)
    assert (line["finish"], line["completion"], line["seed"]) == ("length", 5, 3)
    assert (line["prompt"], line["delivered"], line["connection"]) == (result.usage.prompt_tokens, True, "ok")
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    (refused,) = daemon.wait_events("refused", 1)
    assert (refused["code"], refused["field"], refused["message"]) == ("bad_request", "prompt", "prompt is empty")


def test_tcp_on_a_free_port(spawn: Spawn) -> None:
    daemon = spawn("--listen", "tcp://127.0.0.1:*")
    assert daemon.urls[1].startswith("tcp://127.0.0.1:")
    with Client(daemon.urls[1]) as client:
        assert client.generate(PROMPT, max_tokens=3, ignore_eos=True).result().usage.completion_tokens == 3


# ---- queue and limits ---------------------------------------------------------------------------------------------


def test_a_full_queue_says_busy(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.queue_depth=2", "--set", "engine.client_share=3", script=SLOW)
    with Client(daemon.url) as client:
        running = client.generate([5], max_tokens=1000)
        next(running)
        waiting = [client.generate([5], max_tokens=1) for _ in range(2)]
        with pytest.raises(ull.Busy):
            client.generate([5], max_tokens=1).result()
        assert client.health().queue_length == 2
        running.cancel()
        assert [stream.result().finish_reason for stream in waiting] == ["length", "length"]


def test_a_client_takes_no_more_than_its_share_of_the_queue(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.queue_depth=8", "--set", "engine.client_share=2", script=SLOW)
    with Client(daemon.url) as greedy, Client(daemon.url) as other:
        running = greedy.generate([5], max_tokens=1000)
        next(running)
        waiting = greedy.generate([5], max_tokens=1)
        with pytest.raises(ull.Busy, match="share of the queue is taken: 2 of its requests"):
            greedy.generate([5], max_tokens=1).result()
        beside = other.generate([5], max_tokens=1)
        running.cancel()
        assert [stream.result().finish_reason for stream in (waiting, beside)] == ["length", "length"]


def test_a_timeout_ends_the_request_wherever_it_is(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    with Client(daemon.url) as client:
        running = client.generate([5], max_tokens=1000, timeout=1.5)
        waiting = client.generate([5], max_tokens=1000, timeout=0.05)
        late = waiting.result()
        assert (late.finish_reason, late.token_ids, late.timeline.started_ns) == ("timeout", [], 0)
        result = running.result()
    assert result.finish_reason == "timeout"
    assert 0 < len(result.token_ids) < 1000


def test_long_prompts_are_tokenized_beside_the_event_loop(spawn: Spawn) -> None:
    daemon = spawn()
    with Client(daemon.url) as client:
        text = "x = 1\n" * 500  # beyond what is tokenized inline; far too many tokens
        long = client.generate(text)
        assert client.health().status == "ok"
        with pytest.raises(ull.RequestError, match="too many") as caught:
            long.result()
        assert caught.value.code == "too_long"
        fits = client.generate("    " * 400 + PROMPT, max_tokens=2, ignore_eos=True)
        cancelled = client.generate("    " * 400 + PROMPT, max_tokens=800, ignore_eos=True)
        cancelled.cancel()  # usually while it is being tokenized
        assert fits.result().usage.completion_tokens == 2
        assert cancelled.result().finish_reason == "cancelled"


# ---- start --------------------------------------------------------------------------------------------------------


def test_ready_is_announced_to_systemd(spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = str(tmp_path / "notify.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")  # so that what comes before READY=1 leaves room for it
        daemon = spawn()

        def hear(beginning: str) -> list[str]:
            """The next message that begins so. Before may come WATCHDOG=1, and STATUS= of a thread that is late."""
            while not (said := manager.recv(4096).decode()).startswith(beginning):
                assert said.startswith(("WATCHDOG=1", "STATUS=")), said
            return said.splitlines()

        assert hear("READY=1")[:2] == ["READY=1", f"MAINPID={daemon.pid}"]
        hear("WATCHDOG=1")
        daemon.process.send_signal(signal.SIGTERM)
        hear("STOPPING=1")


def test_the_socket_s_mode_is_the_configured_one(spawn: Spawn) -> None:
    modes = {}
    for mode in ("0o660", "0o600"):
        daemon = spawn("--set", f"ipc_mode={mode}")
        modes[mode] = stat.S_IMODE(Path(daemon.url.removeprefix("ipc://")).stat().st_mode)
    assert modes == {"0o660": 0o660, "0o600": 0o600}


def test_a_deleted_socket_is_bound_again(spawn: Spawn) -> None:
    daemon = spawn()
    path = Path(daemon.url.removeprefix("ipc://"))
    path.unlink()
    (line,) = daemon.wait_events("endpoint", 1)
    assert (line["level"], line["endpoint"]) == ("warning", daemon.url)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.rcvtimeo = 20_000
    client.connect(daemon.url)
    client.send_multipart([wire.VERSION, b"\x82\xa4type\xa6health\xa2id\x01"])
    assert b"ok" in client.recv_multipart()[1]
    context.destroy(0)


def test_a_live_daemon_keeps_its_socket(spawn: Spawn, tiny_bundle: Path) -> None:
    daemon = spawn()
    second = ulld(str(tiny_bundle), "--listen", daemon.url)
    assert second.returncode == 1
    assert f"is held by a live daemon (process {daemon.pid})" in second.stderr
    assert second.stderr.count("\n") == 1 and second.stdout == ""
    with Client(daemon.url) as client:
        assert client.generate(PROMPT, max_tokens=2).result().usage.completion_tokens == 2


def test_a_dead_daemon_s_socket_is_reused(spawn: Spawn) -> None:
    first = spawn()
    path = Path(first.url.removeprefix("ipc://"))
    first.kill()
    assert path.exists()
    second = spawn(url=first.url)
    with Client(second.url) as client:
        assert client.health().status == "ok"
    assert second.stop() == 0
    assert not path.exists()
    assert not path.with_name(path.name + ".lock").exists()


def test_a_foreign_listener_and_a_plain_file_are_left_alone(tiny_bundle: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(taken))
        listener.listen()
        outcome = ulld(str(tiny_bundle), "--listen", f"ipc://{taken}")
    assert (outcome.returncode, "is in use" in outcome.stderr) == (1, True)
    plain = tmp_path / "plain"
    plain.write_text("precious")
    outcome = ulld(str(tiny_bundle), "--listen", f"ipc://{plain}")
    assert (outcome.returncode, "not a socket" in outcome.stderr) == (1, True)
    assert plain.read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "tcp://0.0.0.0:5555"], "insecure_tcp"),
        (["--listen", "nonsense"], "neither ipc"),
        (["--listen", "tcp://127.0.0.1:99999"], "a port is 0 to 65535, not 99999"),
        (["--set", "engine.quee_depth=3"], "did you mean engine.queue_depth?"),
        (["--set", "engine.core=1000"], "core 1000 is not available"),
        (["--cores", "a,b"], "--cores takes numbers"),
        (["--context", "4096"], "engine.context: 4096 is out of range"),
        (["--config", "/nowhere/ulld.toml"], "cannot read /nowhere/ulld.toml"),
        (["--listen", "ipc:///nowhere/ull.sock"], "cannot create /nowhere/ull.sock.lock"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tiny_bundle: Path, arguments: list[str], said: str) -> None:
    outcome = ulld(str(tiny_bundle), *arguments)
    assert outcome.returncode == 1
    assert said in outcome.stderr
    assert outcome.stderr.startswith("ulld: ") and outcome.stderr.count("\n") == 1
    assert outcome.stdout == ""


def test_bad_bundles_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    listen = ["--listen", f"ipc://{tmp_path / 's'}"]
    outcome = ulld(str(tmp_path / "none.ull"), *listen)
    assert (outcome.returncode, "no engine bundle at" in outcome.stderr) == (1, True)
    foreign = tmp_path / "foreign.ull"
    foreign.mkdir()
    outcome = ulld(str(foreign), *listen)
    assert (outcome.returncode, "not an engine bundle" in outcome.stderr) == (1, True)
    assert outcome.stderr.count("\n") == 1
    assert not (tmp_path / "s").exists() and not (tmp_path / "s.lock").exists()


def test_a_tcp_port_in_use(spawn: Spawn, tiny_bundle: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        outcome = ulld(str(tiny_bundle), "--listen", f"tcp://127.0.0.1:{port}")
    assert outcome.returncode == 1
    assert f"tcp://127.0.0.1:{port}" in outcome.stderr and outcome.stderr.count("\n") == 1


def test_pinned_cores(spawn: Spawn) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    daemon = spawn("--cores", f"{allowed[0]},{allowed[1]}")
    with Client(daemon.url) as client:  # an answer comes by way of both threads: they have pinned themselves
        assert client.generate(PROMPT, max_tokens=4, ignore_eos=True).result().usage.completion_tokens == 4
    pinned = [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{daemon.pid}/task").iterdir()]
    assert {allowed[0]} in pinned and {allowed[1]} in pinned


# ---- signals ------------------------------------------------------------------------------------------------------


def test_sigterm_drains(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    with Client(daemon.url) as client:
        running = client.generate([5], max_tokens=1000)  # ends when it is told to, not while we look
        waiting = client.generate([5], max_tokens=100)
        next(running)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_events("draining", 1)
        assert client.health().status == "draining"
        with pytest.raises(ull.Draining):
            client.generate([5]).result()
        running.cancel()
        assert running.result().finish_reason == "cancelled"
        result = waiting.result()
        assert (result.finish_reason, result.usage.completion_tokens) == ("length", 100)
        assert daemon.process.wait(20) == 0
    daemon.check_log()
    (stopped,) = daemon.events("stopped")
    assert (stopped["accepted"], stopped["refused"], stopped["cancelled"]) == (2, 1, 0)
    assert not Path(daemon.url.removeprefix("ipc://")).exists()


def test_the_drain_timeout_cancels_what_is_left(spawn: Spawn) -> None:
    daemon = spawn("--set", "drain_timeout_s=0.1", script=SLOW)
    with Client(daemon.url) as client:
        running, waiting = client.generate([5], max_tokens=1000), client.generate([5], max_tokens=1000)
        held = client.generate([5], max_tokens=1, hold=True, priority="realtime")
        next(running)
        daemon.process.send_signal(signal.SIGTERM)
        for stream in (running, waiting, held):
            ended = stream.result()
            assert ended.finish_reason == "cancelled"
            assert ended.error is not None
            assert ended.error.code == "draining"
        assert daemon.process.wait(20) == 0
    daemon.check_log()


def test_a_second_signal_hurries(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    with Client(daemon.url) as client:
        running = client.generate([5], max_tokens=1000)
        next(running)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_events("draining", 1)
        daemon.process.send_signal(signal.SIGINT)
        assert running.result().finish_reason == "cancelled"
        assert daemon.process.wait(20) == 0
    daemon.check_log()


def test_sighup_without_clients_to_read_again_changes_nothing(spawn: Spawn) -> None:
    daemon = spawn()
    daemon.process.send_signal(signal.SIGHUP)
    (line,) = daemon.wait_events("reload", 1)
    assert "nothing to read again" in line["message"]
    with Client(daemon.url) as client:
        assert client.health().status == "ok"


# ---- trouble ------------------------------------------------------------------------------------------------------


def test_a_killed_daemon_surfaces_and_its_successor_serves(spawn: Spawn) -> None:
    daemon = spawn(script=SLOW)
    with Client(daemon.url, connect_timeout=20) as client:
        stream = client.generate([5], max_tokens=1000)
        next(stream)
        daemon.kill()
        with pytest.raises(ull.ConnectionLost, match="was lost"):
            stream.result()
        spawn(url=daemon.url)
        assert client.generate(PROMPT, max_tokens=2).result().usage.completion_tokens == 2


@pytest.mark.parametrize("restart_helps", [False, True])
def test_a_failed_executor_ends_the_daemon(spawn: Spawn, restart_helps: bool) -> None:
    """Status 3 is the one that systemd does not restart on."""
    reason = "cuGraphLaunch failed with CUDA_ERROR_LAUNCH_FAILED (719)"
    daemon = spawn(script={"fail_step": 200, "failure": reason, "restart_helps": restart_helps, **SLOW})
    with Client(daemon.url) as client:
        running, waiting = client.generate([5], max_tokens=1000), client.generate([5], max_tokens=1000)
        for stream in (running, waiting):
            with pytest.raises(ull.RequestFailed, match="CUDA_ERROR_LAUNCH_FAILED") as failed:
                stream.result()
            assert failed.value.code == "internal"
        assert daemon.process.wait(30) == (4 if restart_helps else 3)
    assert len(daemon.events("request")) == 2
    assert all(line["finish"] == "error" and line["error"] for line in daemon.events("request"))
    (event,) = daemon.events("engine")
    assert (event["level"], event["reason"]) == ("error", reason)
    assert ("restart it" in event["message"]) == restart_helps


def test_an_executor_that_cannot_say_why_it_failed(spawn: Spawn) -> None:
    daemon = spawn(script={"fail_step": 20, **SLOW})
    with Client(daemon.url) as client:
        with pytest.raises(ull.RequestFailed, match="the executor failed"):
            client.generate([5], max_tokens=1000).result()
        assert daemon.process.wait(30) == 3


def test_a_stalled_executor_shows_in_health(spawn: Spawn) -> None:
    daemon = spawn("--set", "engine.watchdog_ms=100", script={"hang_step": 20, "round_ns": 1_000_000})
    with Client(daemon.url) as client:
        stream = client.generate([5], max_tokens=1000)
        next(stream)
        wait_for_status(client, "stalled")
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"
        wait_for_status(client, "ok")


def test_the_module_runs_as_a_script() -> None:
    outcome = ulld("--version")
    assert (outcome.returncode, outcome.stdout.startswith("ulld ")) == (0, True)
    assert ulld().returncode == 2
    assert sys.version_info >= (3, 11)
