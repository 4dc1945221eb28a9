"""Writes the corpus of the fuzzers, from which they mutate: `python tests/fuzz/corpus.py tests/fuzz/corpus`.

What a fuzzer has found once is kept there too, by hand, as `found-*`.
"""

import struct
import sys
from pathlib import Path

import msgspec

VERSION = b"\x01\x04ull1"
SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\x01"


def frame(flags: int, body: bytes) -> bytes:
    """A frame of ZMTP."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def zmtp() -> dict[str, bytes]:
    """Whole connections."""
    greeting = SIGNATURE + b"NULL".ljust(20, b"\0") + bytes(32)
    hello = greeting + frame(4, b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00")
    request = msgspec.msgpack.encode({"type": "generate", "id": 7, "prompt": "x" * 40, "max_tokens": 3})
    long = msgspec.msgpack.encode({"type": "generate", "prompt": "x" * 900, "id": 9})
    return {
        "request": hello + VERSION + frame(0, request),
        "two": hello + (VERSION + frame(0, request)) * 2,
        "long": hello + VERSION + frame(0, long) + VERSION + frame(0, request),
        "ping": hello + frame(4, b"\x04PING\x00\x0aabcd") + VERSION + frame(0, request),
        "parts": hello + VERSION + frame(1, b"a") + frame(1, b"b" * 300) + frame(0, b"c"),
        "version": hello + frame(1, b"ull9") + frame(0, request),
        "error": hello + frame(4, b"\x05ERROR\x03400"),
    }


def local() -> dict[str, bytes]:
    """Whole connections of the local transport."""
    hello = b"ull1" + bytes(4)
    request = msgspec.msgpack.encode({"type": "health", "id": 3})
    long = msgspec.msgpack.encode({"type": "generate", "prompt": "x" * 900, "id": 9})
    message = struct.pack("<I", len(request)) + request
    return {
        "request": hello + message,
        "two": hello + message + message,
        "long": hello + struct.pack("<I", len(long)) + long + message,
        "empty": hello + bytes(4) + message,
    }


def curve() -> dict[str, bytes]:
    """Whole connections with CURVE, sealed by the stand-in of fuzz_curve.cpp: sixteen zeros before each text."""
    mac = bytes(16)
    greeting = SIGNATURE + b"CURVE".ljust(20, b"\0") + bytes(32)
    nonces = iter(range(1, 1000))

    def nonce() -> bytes:
        return struct.pack(">Q", next(nonces))

    client, transient, server = b"\x05" * 32, b"\x02" * 32, b"\x09" * 32
    hello = b"\x05HELLO\x01\x00" + bytes(72) + transient + nonce() + mac + bytes(64)
    vouch = bytes(16) + mac + transient + server
    properties = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
    initiate = b"\x08INITIATE" + b"\x07" * 96 + nonce() + mac + client + vouch + properties
    stranger = initiate.replace(client + vouch, b"\x06" * 32 + vouch)
    shaken = greeting + frame(4, hello) + frame(4, initiate)

    def sealed(flags: int, body: bytes) -> bytes:
        return frame(0, b"\x07MESSAGE" + nonce() + mac + bytes([flags]) + body)

    request = msgspec.msgpack.encode({"type": "generate", "id": 7, "prompt": "x" * 40})
    long = msgspec.msgpack.encode({"type": "generate", "prompt": "x" * 900, "id": 9})
    return {
        "request": shaken + sealed(1, b"ull1") + sealed(0, request),
        "two": shaken + sealed(1, b"ull1") + sealed(0, request) + sealed(1, b"ull1") + sealed(0, request),
        "long": shaken + sealed(1, b"ull1") + sealed(0, long) + sealed(1, b"ull1") + sealed(0, request),
        "ping": shaken + sealed(2, b"\x04PING\x00\x0aabcd"),
        "stranger": greeting + frame(4, hello) + frame(4, stranger),
    }


def request_id() -> dict[str, bytes]:
    """Requests with their id in different places."""
    encode = msgspec.msgpack.encode
    return {
        "first": encode({"id": 5, "prompt": "x" * 30}),
        "last": encode({"type": "generate", "messages": [{"role": "user", "content": "y"}] * 3, "id": 2**64 - 1}),
        "float": encode({"a": [1.5, None, True, b"bytes", {"b": -1}], "id": 7.0}),
    }


def vocabulary() -> dict[str, bytes]:
    """Small vocabularies: magic, version, count, leading spaces, offsets, flags, bytes."""
    pieces = [b"a", b" the", b"", "é".encode(), b"<s>"]
    files = {}
    for version in (1, 2, 3):
        offsets = [0]
        for piece in pieces:
            offsets.append(offsets[-1] + len(piece))
        head = b"ULLVOCAB" + struct.pack("<III", version, len(pieces), 0)
        flags = bytes([0, 0, 0, 0, 1])
        files[f"version{version}"] = head + struct.pack(f"<{len(offsets)}I", *offsets) + flags + b"".join(pieces)
    return files


def main(folder: Path) -> None:
    """Writes all of it."""
    for make in (zmtp, local, curve, request_id, vocabulary):
        (folder / make.__name__).mkdir(parents=True, exist_ok=True)
        for name, data in make().items():
            (folder / make.__name__ / name).write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
