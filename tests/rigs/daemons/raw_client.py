"""A client that sends whatever it is told."""

from typing import Any

import msgspec
import zmq

from ull import wire


class RawClient:
    """A DEALER that sends whatever it is told."""

    def __init__(self, url: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(url)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def send_map(self, **fields: Any) -> None:
        self.send(wire.VERSION, msgspec.msgpack.encode(fields))

    def receive(self) -> wire.Reply:
        """The next message; fails after 20 seconds."""
        assert self._socket.poll(20_000), "no answer"
        version, payload = self._socket.recv_multipart()
        assert version == wire.VERSION
        return wire.decode_reply(payload)

    def collect(self, request_id: int) -> list[wire.Reply]:
        """Everything about one request up to its terminal frame."""
        replies: list[wire.Reply] = []
        while not (replies and isinstance(replies[-1], wire.Done | wire.Error)):
            reply = self.receive()
            if reply.id == request_id:
                replies.append(reply)
        return replies

    def silent(self, seconds: float = 0.2) -> bool:
        """Whether nothing more comes."""
        return not self._socket.poll(int(seconds * 1000))

    def close(self) -> None:
        self._socket.close()
