"""The bindings of the engine: what Python may hand in, and what it gets back. (The loop itself: tests/native.)"""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from native_rig import Rig, write_vocabulary
from ull import _native

ALPHABET = list(b"abcdefghijklmnopqrstuvwxyz")
PROMPT = b"once upon a time there was"  # 26 tokens: the completion begins at "a"


def test_all_parameters_reach_the_request(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": ALPHABET}) as rig:
        client = rig.client(b"client")
        params: dict[str, Any] = {
            "max_tokens": 50,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "min_p": 0.1,
            "seed": 2**64 - 1,
            "stop": [b"zzz", b"hij"],
            "stop_ids": [0, 1],
            "logit_bias": {5: -1.5, 6: float("-inf")},
            "logprobs": 2,
            "timeout_ns": 2**62,
            "deadline_ns": 2**62,
            "priority": "batch",
            "received_ns": 11,
            "admitted_ns": 12,
        }
        rig.submit(b"client", 2**64 - 1, PROMPT, **params)
        frames, done = client.finish(2**64 - 1)
        assert "".join(frame["text"] for frame in frames) == "abcdefg"
        assert [token for frame in frames for token in frame["ids"]] == list(b"abcdefghij")
        logprobs = [entry for frame in frames for entry in frame["logprobs"]]
        assert logprobs[0] == {"token": 97, "logprob": -0.5, "top": [[97, -0.5], [98, -1.5]]}
        assert len(logprobs) == 10
        assert done["finish_reason"] == "stop"
        assert done["seed"] == 2**64 - 1
        assert done["usage"] == {
            "prompt_tokens": 26,
            "cached_tokens": 0,
            "completion_tokens": 10,
            "rolled_back_tokens": 0,
        }
        assert (done["timeline"]["received_ns"], done["timeline"]["admitted_ns"]) == (11, 12)


def test_prompts_come_as_bytes_or_int32_arrays(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": ALPHABET}) as rig:
        client = rig.client(b"client")
        ids = np.frombuffer(PROMPT, np.uint8).astype(np.int32)
        read_only = ids.copy()
        read_only.flags.writeable = False
        for request_id, tokens in enumerate([ids, read_only, ids.tobytes()]):
            rig.engine.submit(client.identity, request_id, tokens, {"max_tokens": 3})
            assert client.finish(request_id)[1]["usage"]["prompt_tokens"] == 26
        for wrong in [ids.astype(np.int64), ids.reshape(2, 13), ids[::2], ids.tolist(), b"abc"]:
            with pytest.raises(_native.InvalidRequest, match="token_ids: ") as caught:
                rig.engine.submit(client.identity, 9, wrong, {})
            assert caught.value.field == "token_ids"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("max_tokens", 2**40),
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("min_p", 2.0),
        ("presence_penalty", 2.5),
        ("presence_penalty", 1.0),  # the scripted executor applies none
        ("frequency_penalty", float("nan")),
        ("frequency_penalty", -1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ["not bytes"]),
        ("stop", [b"x" * 257]),
        ("stop_ids", [2**40]),
        ("stop_ids", list(range(33))),
        ("logit_bias", {128: 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", [1, 2]),
        ("logprobs", 21),
        ("deadline_ns", 1.5),
        ("timeout_ns", "soon"),
        ("priority", "urgent"),
        ("pin", -1),
        ("hold", "yes"),
    ],
)
def test_a_bad_parameter_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with Rig(tmp_path, {"tokens": ALPHABET}) as rig:
        with pytest.raises(_native.InvalidRequest, match=f"^{field}: ") as caught:
            rig.submit(b"client", 1, PROMPT, **{field: value})
        assert isinstance(caught.value, ValueError)
        assert caught.value.field == field
        assert rig.engine.stats()["submitted"] == 0


def test_a_prompt_too_long_says_by_how_much(tmp_path: Path) -> None:
    with (
        Rig(tmp_path, {"tokens": [1], "context": 100}) as rig,
        pytest.raises(_native.InvalidRequest, match=r"too long by 21 tokens \(at most 99\)"),
    ):
        rig.submit(b"client", 1, b"x" * 120)


def test_a_full_queue_a_draining_and_a_failed_engine_refuse(tmp_path: Path) -> None:
    script = {"tokens": ALPHABET, "round_ns": 1_000_000}
    with Rig(tmp_path, script, engine={"queue_depth": 1, "client_share": 2}) as rig:
        assert rig.engine.client_share == 2
        client = rig.client(b"client")
        rig.submit(b"client", 1, PROMPT, max_tokens=4000)
        rig.submit(b"client", 2, PROMPT, max_tokens=3)
        with pytest.raises(_native.QueueFull):
            rig.submit(b"client", 3, PROMPT)
        with pytest.raises(_native.InvalidRequest, match="id: a request with this id is in flight"):
            rig.submit(b"client", 2, PROMPT)
        rig.engine.drain()
        with pytest.raises(_native.EngineClosed, match="draining"):
            rig.submit(b"client", 3, PROMPT)
        assert not rig.engine.drained()
        assert rig.cancel(b"client", 1)
        assert not rig.cancel(b"client", 99)
        assert not rig.engine.cancel(b"nobody", 2)
        assert client.finish(2)[1]["finish_reason"] == "length"
        assert [rig.record()["finish_reason"] for _ in range(2)] == ["cancelled", "length"]
        rig.wait_until(rig.engine.drained)


def test_a_failed_engine_ends_what_it_has_and_refuses_more(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": ALPHABET, "fail_step": 20}) as rig:
        client = rig.client(b"client")
        rig.submit(b"client", 1, PROMPT)
        _, done = client.finish(1)
        assert done["finish_reason"] == "error"
        assert done["error"] == {"code": "internal", "message": "the executor failed"}
        assert rig.record()["error"] == done["error"]
        assert rig.engine.health() == "failed"
        with pytest.raises(_native.EngineClosed, match="failed"):
            rig.submit(b"client", 2, PROMPT)


def test_a_failed_executor_s_reason_reaches_everyone(tmp_path: Path) -> None:
    reason = "cuGraphLaunch failed with CUDA_ERROR_LAUNCH_FAILED (719)"
    with Rig(tmp_path, {"tokens": ALPHABET, "fail_step": 20, "failure": reason, "restart_helps": True}) as rig:
        assert (rig.engine.stats()["failure"], rig.executor.failure, rig.executor.restart_helps) == (None, None, False)
        client = rig.client(b"client")
        rig.submit(b"client", 1, PROMPT)
        assert client.finish(1)[1]["error"] == {"code": "internal", "message": reason}
        assert rig.record()["error"]["message"] == reason
        with pytest.raises(_native.EngineClosed, match="the engine has failed: cuGraphLaunch"):
            rig.submit(b"client", 2, PROMPT)
        assert (rig.engine.stats()["failure"], rig.executor.failure, rig.executor.restart_helps) == (
            reason,
            reason,
            True,
        )


def test_a_hanging_engine_is_stalled_until_it_moves(tmp_path: Path) -> None:
    script = {"tokens": ALPHABET, "hang_step": 20}
    with Rig(tmp_path, script, engine={"watchdog_ms": 20}) as rig:
        client = rig.client(b"client")
        rig.submit(b"client", 1, PROMPT)
        rig.wait_until(lambda: rig.engine.health() == "stalled")
        assert rig.cancel(b"client", 1)
        assert client.finish(1)[1]["finish_reason"] == "cancelled"
        rig.wait_until(lambda: rig.engine.health() == "ok")
        assert rig.engine.stats()["stalls"] >= 1


def test_the_next_turn_finds_its_prefix_cached(tmp_path: Path) -> None:
    for reuse in [True, False]:
        with Rig(tmp_path, {"tokens": ALPHABET}, engine={"prefix_cache": reuse}) as rig:
            client = rig.client(b"client")
            rig.submit(b"client", 1, PROMPT, max_tokens=10)
            frames, _ = client.finish(1)
            turn = PROMPT + bytes(token for frame in frames for token in frame["ids"]) + b" and then?"
            rig.submit(b"client", 2, turn, max_tokens=10)
            assert client.finish(2)[1]["usage"]["cached_tokens"] == (26 + 10 - 1 if reuse else 0)


def test_info_and_stats(tmp_path: Path) -> None:
    with Rig(tmp_path, {"tokens": ALPHABET, "context": 512, "pages": 16}) as rig:
        assert rig.engine.info == {
            "executor": "scripted",
            "vocabulary": 128,
            "context": 512,
            "max_prompt": 511,
            "page_count": 16,
            "prefill_chunk": 256,
            "weight_bytes": 0,
            "kv_bytes": 16 * 64 * 4,
            "drafter_weight_bytes": 0,
            "drafter_kv_bytes": 0,
            "penalties": False,
            "score_nodes": 64,
            "scores_prompts": True,
            "constraints": True,
            "drafters": ["none"],
            "default_drafter": "none",
            "default_max_tree": 64,
            "verify_ns": {},
            "draft_ns": {},
        }
        client = rig.client(b"client")
        rig.submit(b"client", 1, PROMPT, max_tokens=10)
        client.finish(1)
        rig.engine.stop()
        stats = rig.engine.stats()
        assert stats["finished"] == {"stop": 0, "length": 1, "cancelled": 0, "timeout": 0, "deadline": 0, "error": 0}
        assert stats["completion_tokens"] == 10
        assert stats["by_drafter"] == {
            "none": 10,
            "suffix": 0,
            "medusa": 0,
            "eagle": 0,
            "dflash": 0,
            "draft": 0,
        }
        assert (stats["drafted_tokens"], stats["accepted_tokens"]) == (0, 0)
        assert stats["accepted_by_depth"] == [0] * 16
        assert stats["round_ns"]["count"] == 9
        assert stats["round_ns"]["p50"] <= stats["round_ns"]["p99"] <= stats["round_ns"]["max"]
        assert (stats["queue_length"], stats["running"], stats["sessions"]) == (0, 0, 1)


def test_an_engine_keeps_its_executor_alive(tmp_path: Path) -> None:
    vocabulary = str(write_vocabulary(tmp_path / "vocab.bin", [b"a"]))
    engine = _native.Engine(_native.ScriptedExecutor([0], vocabulary=1), vocabulary)
    gc.collect()
    engine.warm_up()
    engine.start()
    assert engine.health() == "ok"
    engine.stop()
    engine.stop()


def test_bad_options_are_named(tmp_path: Path) -> None:
    vocabulary = str(write_vocabulary(tmp_path / "vocab.bin", [b"a"]))
    executor = _native.ScriptedExecutor([0], vocabulary=1)
    wrong = {"queue_depth": -1, "client_share": -1, "idle": "lazy", "watchdog_ms": 0, "max_sessions": 0, "core": -2}
    for options in [{key: value} for key, value in wrong.items()]:
        with pytest.raises(ValueError, match=f"^{next(iter(options))}: "):
            _native.Engine(executor, vocabulary, **options)
    with pytest.raises(RuntimeError, match=r"none\.bin: cannot be opened"):
        _native.Engine(executor, str(tmp_path / "none.bin"))
    with pytest.raises(ValueError, match=r"^tokens: "):
        _native.ScriptedExecutor([])
    with pytest.raises(RuntimeError, match="failed while warming up"):
        _native.Engine(_native.ScriptedExecutor([0], vocabulary=1, fail_step=0), vocabulary).warm_up()


def test_notify_without_a_service_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert _native.notify("READY=1") is False
