"""The daemon's figures through the gateway."""

import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import ull
from conftest import Spawn
from gateways import Gateway
from ull.gateway.keys import new_key


def ask(gateway: Gateway, key: str | None = None) -> str:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{gateway.base}/metrics", headers=headers)) as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        return str(answer.read().decode())


def test_monitors_find_the_daemon_s_figures(spawn: Spawn, tmp_path: Path) -> None:
    daemon = spawn()
    with Gateway(daemon.url, tmp_path) as gateway:
        with ull.Client(daemon.url) as client:
            client.generate("def", max_tokens=5).result()
        told = ask(gateway)
        assert "ull_generation_tokens_total 5.0" in told
        assert 'vllm:generation_tokens_total{model_name="tiny"} 5.0' in told
        daemon.stop()
        time.sleep(1.2)  # an answer may be a second old
        assert "ull_up 0.0" in ask(gateway)
        assert not gateway.requests()  # monitors ask all the time


def test_where_there_are_keys_monitors_need_one(spawn: Spawn, tmp_path: Path) -> None:
    key, line = new_key("prometheus")
    keys = tmp_path / "keys"
    keys.write_text(line)
    with Gateway(spawn().url, tmp_path, "--api-keys", str(keys)) as gateway:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(gateway)
        assert "ull_up 1.0" in ask(gateway, key)
        assert gateway.wait_request(status=401)["path"] == "/metrics"
