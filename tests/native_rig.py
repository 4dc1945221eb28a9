"""The native engine and io thread on a scripted executor, with the test as control plane and as clients."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

from ull import _native

TIMEOUT_MS = 20_000  # a hang, not a slow machine


def write_vocabulary(path: Path, pieces: Sequence[bytes], special: Iterable[int] = ()) -> Path:
    """vocab.bin: magic, version, count, offsets, flags, bytes."""
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    flags = bytearray(len(pieces))
    for token in special:
        flags[token] = 1
    header = b"ULLVOCAB" + struct.pack(f"<II{len(offsets)}I", 1, len(pieces), *offsets)
    path.write_bytes(header + flags + b"".join(pieces))
    return path


def loaded_libzmq() -> str:
    """The path of the libzmq that pyzmq has loaded into this process."""
    return next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libzmq" in line)


class RigClient:
    """A DEALER whose identity is its name."""

    def __init__(self, rig: Rig, name: bytes, **options: Any) -> None:
        self.name = name
        self.socket = rig.context.socket(zmq.DEALER)
        self.socket.routing_id = name
        self.socket.linger = 0
        self.socket.rcvtimeo = TIMEOUT_MS
        for option, value in options.items():
            setattr(self.socket, option, value)
        self.socket.connect(rig.io.endpoints[0])
        self.send([b"ull1", b"hello"])  # the ROUTER knows a client once it has spoken
        assert rig.control.recv_multipart()[:3] == [b"R", name, b"hello"]

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> dict[str, Any]:
        version, payload = self.socket.recv_multipart()
        assert version == b"ull1"
        message: dict[str, Any] = msgspec.msgpack.decode(payload)
        return message

    def finish(self, request_id: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The token frames of a request, and its done frame."""
        frames = []
        while True:
            message = self.receive()
            if message["id"] != request_id:
                continue
            if message["type"] == "done":
                return frames, message
            frames.append(message)


class Rig:
    """An engine whose vocabulary is the 128 ASCII characters (token 0 is special); `script` is the executor's,
    unless one is given."""

    def __init__(
        self,
        folder: Path,
        script: dict[str, Any],
        *,
        engine: dict[str, Any] | None = None,
        io: dict[str, Any] | None = None,
        executor: _native.Executor | None = None,
    ) -> None:
        vocabulary = write_vocabulary(folder / "vocab.bin", [bytes([token]) for token in range(128)], special=[0])
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.executor = executor or _native.ScriptedExecutor(**({"vocabulary": 128} | script))
        self.engine = _native.Engine(self.executor, str(vocabulary), **(engine or {}))
        options = {"listen": [f"ipc://{folder}/sock"], "control": "inproc://control"} | (io or {})
        self.io = _native.Io(self.engine, zmq_context=self.context.underlying, libzmq=loaded_libzmq(), **options)
        self.control = self.context.socket(zmq.PAIR)
        self.control.rcvtimeo = TIMEOUT_MS
        self.control.linger = 0

    def __enter__(self) -> Rig:
        self.engine.warm_up()
        self.engine.start()
        self.io.start()
        self.control.connect("inproc://control")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()
        self.io.stop()
        self.context.destroy(linger=0)

    def client(self, name: bytes, **options: Any) -> RigClient:
        return RigClient(self, name, **options)

    def submit(self, client: bytes, request_id: int, prompt: bytes, **params: Any) -> int:
        """Submits a prompt of ASCII characters."""
        tokens = struct.pack(f"{len(prompt)}i", *prompt)
        return self.engine.submit(client, request_id, tokens, params)

    def record(self) -> dict[str, Any]:
        """The next record of an ended request."""
        kind, payload = self.control.recv_multipart()
        assert kind == b"D"
        record: dict[str, Any] = msgspec.msgpack.decode(payload)
        return record

    def wait_until(self, condition: Any) -> None:
        """Polls until condition() is true; fails after 20 seconds."""
        end = time.monotonic() + TIMEOUT_MS / 1000
        while not condition():
            assert time.monotonic() < end, "never happened"
            time.sleep(0.001)
