"""The daemon's configuration: printed defaults, precise complaints, overrides."""

import tomllib
from pathlib import Path

import pytest

from ull.daemon.config import (
    Config,
    default_toml,
    load_config,
    parse_config,
    parse_override,
)
from ull.errors import ConfigError


def test_printed_defaults_are_exactly_the_defaults() -> None:
    assert parse_config(default_toml()) == Config()
    assert parse_config("") == Config()


def test_printed_defaults_hold_every_key_under_a_comment() -> None:
    lines = default_toml().splitlines()
    keys = [index for index, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    tables = tomllib.loads(default_toml())
    assert len(keys) == sum(len(value) if isinstance(value, dict) else 1 for value in tables.values())
    assert all(lines[index - 1].startswith("# ") for index in keys)
    assert all(len(line) <= 120 for line in lines)


def test_units_and_ranges_are_printed() -> None:
    text = default_toml()
    assert "[milliseconds; 10 to 3600000]" in text
    assert "[debug | info | warning | error]" in text
    assert "ipc_mode = 0o660" in text


def test_a_file_sets_a_subset(tmp_path: Path) -> None:
    path = tmp_path / "ulld.toml"
    path.write_text('listen = ["ipc:///run/a", "tcp://[::1]:7"]\n[engine]\nqueue_depth = 3\n[io]\nidle = "spin"\n')
    config = load_config(path)
    assert config.listen == ["ipc:///run/a", "tcp://[::1]:7"]
    assert (config.engine.queue_depth, config.io.idle, config.engine.watchdog_ms) == (3, "spin", 2000)


def test_overrides_win_over_the_file() -> None:
    config = parse_config("[engine]\nthreads = 2", {"engine.threads": 3, "log.format": "json"})
    assert (config.engine.threads, config.log.format) == (3, "json")


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("lisen = []", "lisen", "did you mean listen?"),
        ("[engine]\nqueue_dept = 3", "engine.queue_dept", "did you mean engine.queue_depth?"),
        ("queue_depth = 3", "queue_depth", "did you mean engine.queue_depth?"),
        ("[engin]\ncore = 1", "engin", "did you mean engine?"),
        ("xyzzy = 1", "xyzzy", "unknown key xyzzy"),
        ("[engine]\ncore = 'x'", "engine.core", "expected `int`, got `str`"),
        ("[engine]\ncore = true", "engine.core", "expected `int`, got `bool`"),
        ("[engine]\nthreads = -1", "engine.threads", ">= 0"),
        ("[engine]\nidle = 'nap'", "engine.idle", "must be one of adaptive, spin; not 'nap'"),
        ("[log]\nlevel = 'trace'", "log.level", "must be one of debug, info, warning, error; not 'trace'"),
        ("verify = 'all'", "verify", "must be one of sizes, hashes; not 'all'"),
        ("[log]\nlevel = 3", "log.level", "expected `str`"),
        ("[engine]\nthreads = 3\ncores = [1, 2]", "engine.threads", "cores names 2"),
        ("[engine]\ncores = [1, 1]", "engine.cores", "different"),
        ("[engine]\ncores = [-1]", "engine.cores", "0 to 1023"),
        ("[engine]\ncores = [1024]", "engine.cores", "0 to 1023"),
        ("drain_timeout_s = inf", "drain_timeout_s", "<= 1000000"),
        ("[io]\npriority = 100", "io.priority", "<= 99"),
        ("[io]\npriority = 5\nidle = 'spin'", "io.priority", "give io.core one of its own"),
        ("engine = 3", "engine", "expected `object`"),
        ("drain_timeout_s = nan", "drain_timeout_s", ">= 0"),
        ("ipc_mode = 0o7777", "ipc_mode", "<= 511"),
        ("listen = ['udp://x']", "listen", "neither ipc"),
        ("listen = ['ipc://']", "listen", "neither ipc"),
        ("listen = ['tcp://127.0.0.1']", "listen", "no port"),
        ("listen = ['ipc:///a', 'ipc:///a']", "listen", "twice"),
        ("listen = ['ipc:///tmp/a', 'ipc:///tmp//a']", "listen", "twice: ipc:///tmp/a and ipc:///tmp//a are the same"),
        ("listen = ['tcp://localhost:7', 'tcp://127.0.0.1:7']", "listen", "twice"),
        ("listen = ['tcp://127.0.0.1:65536']", "listen", "a port is 0 to 65535, not 65536"),
        ("listen = ['tcp://[::]:5555']", "listen", "insecure_tcp = true"),
        (f"listen = ['ipc:///{'x' * 120}']", "listen", "longer than 107 bytes"),
        ("listen = ['tcp://0.0.0.0:5555']", "listen", "insecure_tcp = true"),
        ("listen = ['tcp://*:5555']", "listen", "insecure_tcp = true"),
        ("listen = ['tcp://192.168.0.1:5555']", "listen", "reachable from other machines"),
        ("[io]\nmax_message_bytes = 1000", "io.max_message_bytes", "0, or at least 1024"),
        ("[requests]\nmax_tokens_limit = 10", "requests.default_max_tokens", "above"),
        ("x =", None, "not valid TOML"),
    ],
)
def test_complaints_name_the_key(text: str, field: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert caught.value.field == field
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_tcp_beyond_loopback_is_possible_when_asked_for() -> None:
    config = parse_config("insecure_tcp = true\nlisten = ['tcp://0.0.0.0:5555']")
    assert config.listen == ["tcp://0.0.0.0:5555"]


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(binary)


def test_overrides_on_the_command_line() -> None:
    assert parse_override("engine.threads=3") == ("engine.threads", 3)
    assert parse_override("log.format = json") == ("log.format", "json")
    assert parse_override('listen=["ipc:///a"]') == ("listen", ["ipc:///a"])
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_override("engine.threads")
    with pytest.raises(ConfigError, match="a table, not a value"):
        parse_config("log = 3", {"log.format": "json"})
