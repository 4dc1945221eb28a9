"""What the daemon does with a bundle for a GPU, up to the graph program and the executor, which are played."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import ull
from conftest import ROOT, Daemon, Spawn
from ull.client.sync import Client
from ull.errors import DaemonError


@pytest.fixture
def gpu(spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpu(*arguments, script={...}, **played): a daemon; gpu.calls(): what its program and executor were told."""

    def start(*arguments: str, script: dict[str, Any] | None = None, **played: Any) -> Daemon:
        monkeypatch.setenv("ULL_TEST_SCRIPT", json.dumps(script or {}))
        monkeypatch.setenv("ULL_TEST_GPU", json.dumps({"folder": str(tmp_path)} | played))
        return spawn(*arguments, command=[sys.executable, str(ROOT / "tests/rigs/daemons/gpu_daemon.py")])

    def calls() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    start.calls = calls  # type: ignore[attr-defined]
    return start


def test_it_is_loaded_served_and_given_back(gpu: Any) -> None:
    arguments = [
        "engine.device=3",
        "engine.context=128",
        "engine.kv_pages=40",
        "engine.persistent=true",
        "engine.watchdog_ms=1500",
        "engine.prefill_chunk=256",
        "speculation.adaptive=false",
    ]
    daemon = gpu(*[word for argument in arguments for word in ("--set", argument)])
    with Client(daemon.url) as client:
        assert client.generate([5], max_tokens=4).result().token_ids == [41, 42, 43, 40]
        info = client.info()
        assert (info.executor["threads"], info.executor["device"], info.limits["context"]) == (1, 3, 128)
    assert daemon.stop() == 0
    daemon.check_log()
    assert gpu.calls() == [
        {"call": "load", "target": "sm_90a", "context": 128, "pages": 40, "device": 3, "persistent": True},
        {
            "call": "execute",
            "watchdog_ms": 1500,
            "prefill_chunk": 256,
            "drafter": "suffix",
            "max_tree": 16,
            "adaptive": False,
            "past_outputs": True,
        },
        {"call": "close"},
    ]


def test_a_context_beyond_the_bundle_s_is_refused_before_anything_is_loaded(gpu: Any, tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match=r"engine.context: 999999 is out of range"):
        gpu("--set", "engine.context=999999")
    assert not (tmp_path / "calls").exists()


def test_a_gpu_that_cannot_is_a_clear_refusal(gpu: Any, tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match="ulld: no GPU is there; remedy"):
        gpu(error="no GPU is there; remedy")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(("restart_helps", "status"), [(False, 3), (True, 4)])
def test_a_failed_device_is_not_asked_to_give_anything_back(gpu: Any, restart_helps: bool, status: int) -> None:
    reason = "a round failed with CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    daemon = gpu(script={"fail_step": 20, "failure": reason, "restart_helps": restart_helps})
    with Client(daemon.url) as client, pytest.raises(ull.RequestFailed, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        client.generate([5], max_tokens=100).result()
    assert daemon.process.wait(30) == status
    assert [call["call"] for call in gpu.calls()] == ["load", "execute", "abandon"]


def test_a_device_that_fails_while_warming_up(gpu: Any) -> None:
    with pytest.raises(DaemonError, match="the executor failed while warming up: CUDA_ERROR_NO_DEVICE"):
        gpu(script={"fail_step": 1, "failure": "CUDA_ERROR_NO_DEVICE"})
    assert [call["call"] for call in gpu.calls()] == ["load", "execute", "abandon"]
