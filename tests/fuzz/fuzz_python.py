"""Fuzzes what reads bytes in Python, with mutations of a seeded generator: `fuzz_python.py EXECUTIONS [SEED [BUNDLE]]`.

Requests and answers on the wire, a bundle's files, configurations and key files. Whatever the bytes are, the outcome is
a value or the error that is documented.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ull import wire
from ull.bundle.open import read_manifest
from ull.bundle.tensor_file import read_tensor_file
from ull.curve import new_pair, read_client, read_clients, write_key
from ull.daemon.config import default_toml, parse_config
from ull.errors import BundleError, ConfigError

_ODD = (0x00, 0x01, 0x7F, 0x80, 0x81, 0x90, 0xC0, 0xC1, 0xCB, 0xCF, 0xD9, 0xDC, 0xDF, 0xFF, 0x22, 0x5B, 0x7B)


def mutated(data: bytes, others: Sequence[bytes], random_: random.Random) -> bytes:
    """The bytes, changed in up to five places."""
    out = bytearray(data)
    for _ in range(random_.randrange(6)):
        at = random_.randrange(len(out) + 1)
        kind = random_.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << random_.randrange(8)
        elif kind == 1:
            out[at : at + 1] = bytes([random_.choice(_ODD)])
        elif kind == 2:
            del out[at : at + random_.randrange(20)]
        elif kind == 3:
            other = random_.choice(others)
            begin = random_.randrange(len(other) + 1)
            out[at:at] = other[begin : begin + random_.randrange(40)]
        elif kind == 4:
            out[at : at + 8] = random_.randbytes(random_.choice([1, 2, 4, 8]))
        else:
            out[at:at] = bytes([random_.choice(_ODD)]) * random_.choice([1, 3, 200])
    return bytes(out[:20_000])


class Target(NamedTuple):
    """What is fuzzed: a reader that raises nothing but what is documented, and what it reads rightly."""

    name: str
    read: Callable[[bytes], object]
    corpus: list[bytes]


def targets(folder: Path, bundle: Path | None) -> list[Target]:
    """All of them. `folder` is for files; without a bundle its files are not fuzzed."""
    file = folder / "fuzzed"

    def of_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def whole(data: bytes) -> object:
            file.write_bytes(data)
            file.chmod(0o600)
            return read(file)

        return whole

    key, listed = folder / "client.key", new_pair()
    key.unlink(missing_ok=True)
    write_key(key, new_pair(), name="x", server=listed.public)
    clients = f"# list\nalice admin {listed.public}\nbob generate {new_pair().public}\n".encode()
    found = [
        Target("requests", only(wire.WireError, wire.read_request), requests()),
        Target("replies", only(wire.WireError, wire.decode_reply), replies()),
        Target("configuration", only(ConfigError, lambda data: parse_config(data.decode())), [default_toml().encode()]),
        Target("client list", only(ConfigError, of_file(read_clients)), [clients]),
        Target("key file", only(ConfigError, of_file(read_client)), [key.read_bytes()]),
    ]
    if bundle is not None:
        manifest = (bundle / "manifest.json").read_bytes()
        whole = (bundle / "weights.safetensors").read_bytes()
        weights = whole[: 8 + int.from_bytes(whole[:8], "little")]  # its header
        found += [
            Target("manifest", only(BundleError, of_file(lambda path: manifest_of(path, folder))), [manifest]),
            Target("tensors", only(ValueError, of_file(read_tensor_file)), [weights]),
        ]
    return found


def manifest_of(path: Path, folder: Path) -> object:
    """The manifest of a bundle that has this file for one."""
    bundle = folder / "bundle"
    bundle.mkdir(exist_ok=True)
    path.replace(bundle / "manifest.json")
    return read_manifest(bundle)


def only(error: type[Exception], read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """`read`, whose documented error is an outcome like others."""

    def guarded(data: bytes) -> object:
        with contextlib.suppress(error, UnicodeDecodeError):  # a text that is none is its reader's caller's to refuse
            return read(data)
        return None

    return guarded


def requests() -> list[bytes]:
    """Messages to a daemon."""
    messages: list[wire.Request] = [
        wire.Generate(id=1, prompt="def main():", max_tokens=5, temperature=0.5, stop=["a", "b"], logit_bias={5: 1.0}),
        wire.Generate(id=2, messages=[wire.Message(role="user", content="hello")], json_schema={"type": "object"}),
        wire.Tokenize(id=3, prompt="x"),
        wire.OpenSession(id=4, session=1),
        wire.Stats(id=5, histograms=True),
        wire.Trace(id=6, steps=9),
        wire.SetLog(id=7, level="debug"),
    ]
    return [wire.encode(message) for message in messages]


def replies() -> list[bytes]:
    """Messages of a daemon."""
    usage, timeline = wire.Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=2), wire.Timeline(received_ns=1)
    messages: list[wire.Reply] = [
        wire.Token(id=1, index=0, ids=[5, 6], text="ab", time_ns=10),
        wire.Done(id=1, finish_reason="stop", usage=usage, timeline=timeline, seed=3),
        wire.Error(id=1, code="busy", message="no", field=None),
        wire.StatsReply(id=2, requests={"a": 1}, latency={}, engine={}, io={}),
    ]
    return [wire.encode(message) for message in messages]


def run(target: Target, executions: int, seed: int) -> None:
    """Reads so many mutations. What it raises is a defect; the bytes that did it go to standard error."""
    random_ = random.Random(f"{target.name} {seed}")
    for _ in range(executions):
        data = mutated(random_.choice(target.corpus), target.corpus, random_)
        try:
            target.read(data)
        except BaseException:
            print(f"{target.name}: {len(data)} bytes, {data.hex()[:4000]}", file=sys.stderr)
            raise


def main(executions: int, seed: int, bundle: Path | None) -> None:
    """Runs all of them, and counts."""
    with tempfile.TemporaryDirectory() as folder:
        for target in targets(Path(folder), bundle):
            began = time.monotonic()
            run(target, executions, seed)
            print(f"{target.name}: {executions} executions, seed {seed}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:3]]
    given = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(".cache/tiny.ull")
    main(arguments[0], arguments[1] if len(arguments) > 1 else 1, given if given.is_dir() else None)
