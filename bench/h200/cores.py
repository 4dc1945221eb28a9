"""Who runs where while a client measures latencies: each thread on a token's way on a core of its own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from ull.client.sync import Client
from ull.spawn import DaemonProcess

_NEEDED = 5  # engine, io, the client, its libzmq, everything else
TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Cores:
    """`daemon`, `client` and `client_libzmq`: the cores of each. `arguments`: ulld's, which pins its own threads."""

    daemon: set[int]
    client: set[int]
    client_libzmq: set[int]
    arguments: list[str]


def client_cores(available: Sequence[int], topology: Path = TOPOLOGY) -> Cores:
    """The last physical cores of those that `available` CPUs are of; where there are too few, everything runs anywhere.

    Nobody is put on the other CPUs of these cores. Where `topology` says nothing of them each CPU is a core.
    """
    cores = physical_cores(available, topology)
    if len(cores) < _NEEDED:
        return Cores(set(available), set(available), set(available), [])
    *others, client_libzmq, client, io, engine = cores
    spinning = ["--set=engine.idle=spin", "--set=io.idle=spin"]
    return Cores(
        daemon={engine[0], io[0], *(cpu for core in others for cpu in core)},
        client={client[0]},
        client_libzmq={client_libzmq[0]},
        arguments=["--cores", f"{engine[0]},{io[0]}", *spinning],
    )


def physical_cores(available: Sequence[int], topology: Path) -> list[list[int]]:
    """The available CPUs of each core, both in ascending order."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(available):
        told = topology / f"cpu{cpu}/topology/thread_siblings_list"
        siblings = told.read_text().strip() if told.exists() else ""
        cores.setdefault(siblings or str(cpu), []).append(cpu)
    return list(cores.values())


@contextmanager
def placed_client(bundle: Path, **options: Any) -> Iterator[tuple[Client, dict[str, Any]]]:
    """A client of a daemon on this bundle, each thread in its place, and these places. `options`: DaemonProcess's.

    Speculation is not adaptive: a head that is right about nothing goes on to read along.
    """
    available = os.sched_getaffinity(0)
    cores = client_cores(sorted(available))
    arguments = [*cores.arguments, "--set=speculation.adaptive=false"]
    try:
        os.sched_setaffinity(0, cores.daemon)  # the daemon inherits it
        with (
            DaemonProcess(bundle, arguments=arguments, ready_timeout=300.0, **options) as daemon,
            zmq.Context() as context,
        ):
            os.sched_setaffinity(0, cores.client_libzmq)  # its threads are started here and stay
            context.socket(zmq.PAIR).close()
            os.sched_setaffinity(0, cores.client)
            gc.freeze()  # a full collection of what was imported takes 20 ms
            with Client(daemon.url, context=context) as client:
                executor = client.info().executor
                client_cpus = {"client": sorted(cores.client), "client_libzmq": sorted(cores.client_libzmq)}
                yield client, {**executor["placement"], **client_cpus, "adaptive": executor["adaptive"]}
    finally:
        gc.unfreeze()
        os.sched_setaffinity(0, available)
