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
from ull.daemon.control import IoMessage
from ull.libzmq import loaded_libzmq

TIMEOUT_MS = 20_000  # a hang, not a slow machine
_NEWS = (IoMessage.GONE, IoMessage.PEER)


def write_vocabulary(path: Path, pieces: Sequence[bytes], special: Iterable[int] = ()) -> Path:
    """vocab.bin: magic, version, count, leading spaces, offsets, flags, bytes."""
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    flags = bytearray(len(pieces))
    for token in special:
        flags[token] = 1
    header = b"ULLVOCAB" + struct.pack(f"<III{len(offsets)}I", 2, len(pieces), 0, *offsets)
    path.write_bytes(header + flags + b"".join(pieces))
    return path


class Control:
    """The control plane's PAIR, on which clients are called by their names in the test."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._identities: dict[bytes, bytes] = {}  # by name
        socket.rcvtimeo = TIMEOUT_MS
        socket.linger = 0

    def set_high_water(self, messages: int) -> None:
        """Of what waits on this side, in each direction; 0: as much as comes."""
        self._socket.rcvhwm = self._socket.sndhwm = messages

    def connect(self, endpoint: str) -> None:
        self._socket.connect(endpoint)

    def meet(self, name: bytes, identity: bytes) -> None:
        self._identities[name] = identity

    def identity(self, name: bytes) -> bytes:
        """A client's; of a name that no client has, the name itself."""
        return self._identities.get(name, name)

    def name(self, identity: bytes) -> bytes:
        """The newest name of a client; of an unknown one, its identity."""
        return next((name for name, each in reversed(self._identities.items()) if each == identity), identity)

    def recv_multipart(self, hang_ups: bool = False) -> list[bytes]:
        """The next message; not who a client is, and that one has hung up only if asked for."""
        while (frames := self._socket.recv_multipart())[0] in _NEWS and not (hang_ups and frames[0] == IoMessage.GONE):
            pass
        if frames[0] in (IoMessage.REQUEST, IoMessage.MALFORMED, IoMessage.GONE):
            frames[1] = self.name(frames[1])
        return frames

    def send_multipart(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([self.identity(frames[0]), *frames[1:]])


class RigClient:
    """A DEALER that has said hello."""

    def __init__(self, rig: Rig, name: bytes, **options: Any) -> None:
        self.name = name
        self.socket = rig.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = TIMEOUT_MS
        for option, value in options.items():
            setattr(self.socket, option, value)
        self.socket.connect(rig.io.endpoints[0])
        self.send([b"ull1", b"hello"])
        kind, self.identity, payload, _ = rig.control.recv_multipart()
        assert (kind, payload) == (IoMessage.REQUEST, b"hello")
        rig.control.meet(name, self.identity)

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
    """An engine whose vocabulary is the 128 ASCII characters (token 0 is special), unless another is given; `script` is
    the executor's, unless one is given."""

    def __init__(
        self,
        folder: Path,
        script: dict[str, Any],
        *,
        engine: dict[str, Any] | None = None,
        io: dict[str, Any] | None = None,
        executor: _native.Executor | None = None,
        vocabulary: Path | None = None,
    ) -> None:
        letters = [bytes([token]) for token in range(128)]
        vocabulary = vocabulary or write_vocabulary(folder / "vocab.bin", letters, special=[0])
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.executor = executor or _native.ScriptedExecutor(**({"vocabulary": 128} | script))
        self.engine = _native.Engine(self.executor, str(vocabulary), **(engine or {}))
        options = {"listen": [f"ipc://{folder}/sock"], "control": "inproc://control"} | (io or {})
        self.io = _native.Io(self.engine, zmq_context=self.context.underlying, libzmq=loaded_libzmq(), **options)
        self.control = Control(self.context.socket(zmq.PAIR))

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
        for endpoint in self.io.endpoints:
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)  # as the daemon's claim does
        self.context.destroy(linger=0)

    def client(self, name: bytes, **options: Any) -> RigClient:
        return RigClient(self, name, **options)

    def submit(self, client: bytes, request_id: int, prompt: bytes, **params: Any) -> int:
        """Submits a prompt of ASCII characters."""
        tokens = struct.pack(f"{len(prompt)}i", *prompt)
        return self.engine.submit(self.control.identity(client), request_id, tokens, params)

    def cancel(self, client: bytes, request_id: int) -> bool:
        return self.engine.cancel(self.control.identity(client), request_id)

    def record(self) -> dict[str, Any]:
        """The next record of an ended request."""
        kind, payload = self.control.recv_multipart()
        assert kind == IoMessage.ENDED
        record: dict[str, Any] = msgspec.msgpack.decode(payload)
        record["identity"] = self.control.name(record["identity"])
        return record

    def wait_until(self, condition: Any) -> None:
        """Polls until condition() is true; fails after 20 seconds."""
        end = time.monotonic() + TIMEOUT_MS / 1000
        while not condition():
            assert time.monotonic() < end, "never happened"
            time.sleep(0.001)
