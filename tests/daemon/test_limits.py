"""The ranges of the configuration are the core's: both ends are taken or refused by name, what is beyond by name."""

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from ull.daemon import main, server
from ull.daemon.config import Config, parse_config
from ull.daemon.executors import open_executor
from ull.errors import ConfigError
from ull.spawn import python_command, python_environment

AS_FAR = "this is as far as it goes"
# At their largest these take gigabytes, which `test_what_is_too_large_is_said_with_its_size` has, or minutes.
LARGE = {"engine.queue_depth", "engine.prefill_chunk", "engine.threads"}


def numbers(struct: type[msgspec.Struct] = Config, prefix: str = "") -> Iterator[tuple[str, msgspec.Meta]]:
    """Every key whose value is a number, with what is said of it."""
    for name, kind in get_type_hints(struct, include_extras=True).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from numbers(kind, f"{prefix}{name}.")
        elif get_args(kind)[0] in (int, float):
            yield prefix + name, get_args(kind)[1]


NUMBERS = dict(numbers())


def test_every_number_has_a_range() -> None:
    assert len(NUMBERS) >= 20 and {"engine.kv_pages", "io.core", "drain_timeout_s", "ipc_mode"} <= NUMBERS.keys()
    for key, meta in NUMBERS.items():
        assert meta.ge is not None and meta.le is not None, key


@pytest.mark.parametrize("key", NUMBERS)
def test_beyond_the_range_is_refused_by_name(key: str) -> None:
    ge, le = NUMBERS[key].ge, NUMBERS[key].le
    assert ge is not None and le is not None
    for value in (ge - 1, le + 1, -(2**63), 2**63, 2**64, 10**30):
        with pytest.raises(ConfigError) as caught:
            parse_config("", {key: value})
        assert caught.value.field == key
        assert key in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize("key", NUMBERS)
def test_the_ends_of_the_range_are_taken_or_refused_by_name(
    key: str, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A daemon is put together up to its sockets: that is as far as any number goes, but those of the io thread."""

    class Io:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise RuntimeError(AS_FAR)

    if not key.startswith("io."):
        monkeypatch.setattr(server._native, "Io", Io)
    else:  # its own numbers are checked when it is made; it then would serve
        monkeypatch.setattr(server._native.Io, "start", Io)
    arguments = [str(tiny_bundle), "--listen", f"ipc://{tmp_path}/s", "--set", "lock_memory=off"]
    ends = [NUMBERS[key].ge] if key in LARGE else [NUMBERS[key].ge, NUMBERS[key].le]
    for value in ends:
        more = ["--threads", "1"] if key not in ("engine.threads",) else []
        assert main.run([*arguments, *more, "--set", f"{key}={value}"]) == 1
        out, err = capfd.readouterr()
        complaints = [line for line in err.splitlines() if line.startswith("ulld: ")]
        assert out == "" and "Traceback" not in err
        assert len(complaints) == 1 and (AS_FAR in complaints[0] or key in complaints[0]), (value, complaints)


@pytest.mark.parametrize(
    ("key", "value", "available", "size"),
    [
        ("engine.kv_pages", 100_000_000, 1_100_000_000, "100000000 pages of 98.3 kB: 9.8 TB"),
        ("engine.kv_pages", 40_000, 1_100_000_000, "40000 pages of 98.3 kB: 3.9 GB"),
        ("engine.queue_depth", 65536, 1_100_000_000, "65536 requests of up to 1024 tokens: 1."),
        ("engine.prefill_chunk", 65536, 600_000_000, "activations of 65536 tokens: "),
    ],
)
def test_what_is_too_large_is_said_with_its_size(
    tiny_bundle: Path, tmp_path: Path, key: str, value: int, available: int, size: str
) -> None:
    command = [
        *python_command("ull.daemon"),
        str(tiny_bundle),
        "--listen",
        f"ipc://{tmp_path}/s",
        "--threads",
        "1",
    ]
    outcome = subprocess.run(
        [*command, "--set", f"{key}={value}", "--set", "lock_memory=off"],
        env={**python_environment(), "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (available, available)),
    )
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith(f"ulld: cannot start: {key}: {size}"), outcome.stderr
    assert "cannot be allocated (this machine has " in outcome.stderr and outcome.stderr.count("\n") == 1


def test_too_few_pages_are_said(tiny_bundle: Path) -> None:
    from contextlib import ExitStack

    from ull.bundle import open_bundle

    class Log:
        def __init__(self) -> None:
            self.warnings: list[str] = []

        def warning(self, _: str, message: str) -> None:
            self.warnings.append(message)

    def complaints(**keys: int) -> list[str]:
        log, config = Log(), parse_config("", {f"engine.{key}": value for key, value in keys.items()})
        with ExitStack() as stack:
            open_executor(open_bundle(tiny_bundle), config, 1, (), log, stack)  # type: ignore[arg-type]
        return log.warnings

    assert complaints() == complaints(kv_pages=16) == complaints(kv_pages=1, context=64) == []
    assert complaints(kv_pages=15) == [
        "engine.kv_pages: 15 pages hold 960 tokens, of the bundle's context of 1024: a request may have no more; "
        "16 pages hold all of it"
    ]
    with pytest.raises(ConfigError, match=r"engine.kv_pages: one page holds 64 tokens, but engine.context is 65") as no:
        complaints(kv_pages=1, context=65)
    assert no.value.field == "engine.kv_pages" and "set engine.kv_pages to 2 or more" in no.value.message
