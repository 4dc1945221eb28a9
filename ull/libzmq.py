"""Which libzmq this process uses."""

from __future__ import annotations

from pathlib import Path

import zmq

from ull.errors import DaemonError


def loaded_libsodium() -> str:
    """The path of the libsodium that libzmq uses for CURVE. Raises DaemonError if there is none."""
    zmq.Context()  # loads it
    if (path := _loaded("libsodium")) is not None:
        return path
    raise DaemonError("libzmq has no libsodium, so that there is no CURVE; install pyzmq from its wheel")


def loaded_libzmq() -> str:
    """The path of the libzmq that pyzmq has loaded; the native io thread uses the same one.

    Raises DaemonError if there is none, as with a statically linked pyzmq.
    """
    zmq.Context()  # loads it
    if (path := _loaded("libzmq")) is not None:
        return path
    raise DaemonError("pyzmq has loaded no shared libzmq; install pyzmq from its wheel")


def _loaded(name: str) -> str | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if name in path.rpartition("/")[2]:
            return "/" + path
    return None
