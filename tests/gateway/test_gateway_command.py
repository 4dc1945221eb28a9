"""`ull-gateway` from its command line: keys, wrong usage, how it ends."""

import signal
import time
from pathlib import Path

import openai
import pytest

from conftest import Daemon
from gateways import Gateway
from processes import gateway
from ull.errors import ConfigError
from ull.gateway.keys import Keys, new_key

CHAT: list = [{"role": "user", "content": "Open the file."}]  # type: ignore[type-arg]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--connect", "http://x"), "http://x"),
        (("--port", "70000"), "--port must be 0 to 65535"),
        (("--host", "0.0.0.0"), "give --api-keys FILE, or say --allow-anyone"),
        (("--host", "::"), "give --api-keys FILE, or say --allow-anyone"),
        (("--host", "no.such.host.invalid", "--allow-anyone"), "cannot listen on no.such.host.invalid"),
        (("--api-keys", "/nowhere/keys"), "/nowhere/keys cannot be read"),
        (("--max-connections", "0"), "--max-connections must be above 0"),
        (("--read-timeout", "-1"), "--read-timeout must be above 0"),
        (("--new-key", "a b"), "is no name of a key"),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_to_do(arguments: tuple[str, ...], words: str) -> None:
    outcome = gateway(*arguments)
    assert outcome.returncode == 1
    assert words in outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert outcome.stdout == ""


def test_a_port_that_is_taken_is_named(shared_daemon: Daemon, tmp_path: Path) -> None:
    with Gateway(shared_daemon.url, tmp_path) as first:
        outcome = gateway("--port", str(first.port))
    assert outcome.returncode == 1
    assert f"cannot listen on 127.0.0.1:{first.port}: Address already in use" in outcome.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_well(shared_daemon: Daemon, tmp_path: Path, number: int) -> None:
    served = Gateway(shared_daemon.url, tmp_path)
    served.process.send_signal(number)
    assert served.process.wait(60) == 0
    assert served.log_path.read_text(encoding="utf-8") == ""
    served.stop()


def test_only_those_with_a_key_are_served(shared_daemon: Daemon, tmp_path: Path) -> None:
    made = gateway("--new-key", "robot")
    key, _, line = made.stdout.splitlines()
    other, other_line = new_key("person")
    assert line.split()[1] not in key
    assert key not in line
    file = tmp_path / "keys"
    file.write_text(f"# who may ask\n{line}\n", encoding="utf-8")
    with Gateway(shared_daemon.url, tmp_path, "--api-keys", str(file), "--host", "0.0.0.0") as served:
        base = f"http://127.0.0.1:{served.port}/v1"

        def ask(with_key: str) -> str:
            with openai.OpenAI(base_url=base, api_key=with_key, max_retries=0) as client:
                client.models.list()
                answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2)
                return answer.choices[0].message.content or ""

        assert ask(key)
        assert served.wait_request(path="/v1/chat/completions", status=200)["owner"] == "robot"
        for wrong in ("nobody", other, line.split()[1], "ß", key + "x"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                ask(wrong)
        assert openai.OpenAI(base_url=base, api_key="x").get(f"http://127.0.0.1:{served.port}/health", cast_to=object)

        file.write_text(f"{other_line}\n", encoding="utf-8")  # one key goes, one comes, and nothing is started again
        deadline = time.monotonic() + 20
        while True:
            try:
                ask(other)
                break
            except openai.AuthenticationError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        with pytest.raises(openai.AuthenticationError):
            ask(key)

        file.write_text("damaged\n", encoding="utf-8")  # those that were let in stay
        time.sleep(1.2)
        assert ask(other)
        assert key not in served.log_path.read_text(encoding="utf-8")


def test_a_file_of_keys_that_is_damaged_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{new_key('a')[1]}\nb sha\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2: must be a name and the SHA-256"):
        Keys(file)
