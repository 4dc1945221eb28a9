"""Who runs where while a client measures the gaps between tokens: each thread on a token's way on a core of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_NEEDED = 5  # engine, io, the client, its libzmq, everything else


@dataclass(frozen=True)
class Cores:
    """`daemon`, `client` and `client_libzmq`: the cores of each. `arguments`: ulld's, which pins its own threads."""

    daemon: set[int]
    client: set[int]
    client_libzmq: set[int]
    arguments: list[str]


def client_cores(available: Sequence[int]) -> Cores:
    """Of `available`, in ascending order, the last ones; where there are too few, everything runs anywhere."""
    if len(available) < _NEEDED:
        return Cores(set(available), set(available), set(available), [])
    *_, client_libzmq, client, io, engine = available
    spinning = ["--set=engine.idle=spin", "--set=io.idle=spin"]
    return Cores(
        daemon=set(available) - {client, client_libzmq},
        client={client},
        client_libzmq={client_libzmq},
        arguments=["--cores", f"{engine},{io}", *spinning],
    )
