"""One real request through each of a daemon's transports and back, before it says that it is ready.

What no part shows alone is found before a client finds it, and the first client gets a path that is warm.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import zmq

from ull.client.aio import AsyncClient
from ull.client.link import Transport
from ull.curve import CurveKeys
from ull.daemon.control import ControlPlane
from ull.endpoints import ipc_path, local_path
from ull.errors import Busy, DaemonError, UllError

LIMIT_S = 30.0  # without any progress of the engine
_LOOK_S = 0.05  # between two looks at what may end the wait
_RETRY_S = 0.05  # after `busy`, where the daemon names no time
_FOREVER_S = 1e6  # for the client: the limit here is the one that counts
_OWNER_WRITES = 0o200


async def rehearse(
    url: str,
    ipc_mode: int,
    context: zmq.Context[zmq.Socket[bytes]],
    control: ControlPlane,
    max_tokens: int,
    progress: Callable[[], int],
    heed: Callable[[], None],
    keys: CurveKeys | None = None,
) -> None:
    """Sends a request to the daemon's own endpoint `url`, by ZeroMQ and by the local transport where there is one.

    `progress` counts what the engine gets done: behind other clients' requests this one may wait. `heed` raises what
    ends the start. Raises DaemonError if an answer fails or does not come.
    """
    path = ipc_path(url)
    if path is not None and not ipc_mode & _OWNER_WRITES:
        return  # only others may connect
    transports: tuple[Transport, ...] = ("zeromq",)
    if path is not None and local_path(path) is not None:
        transports = ("zeromq", "local")
    for transport in transports:
        async with AsyncClient(
            url, connect_timeout=_FOREVER_S, silence_timeout=_FOREVER_S, transport=transport, context=context, keys=keys
        ) as client:
            request = asyncio.ensure_future(_request(client, control, max_tokens))
            try:
                await _wait(request, control, progress, heed)
                request.result()
            except UllError as error:
                raise DaemonError(
                    f"cannot start: the request that the daemon sends itself at {url} ({transport}) failed: {error}"
                ) from error
            finally:
                request.cancel()


async def _request(client: AsyncClient, control: ControlPlane, max_tokens: int) -> None:
    """One request, until the control plane has heard of its end too."""
    control.rehearsal = secrets.randbits(64)
    while True:
        stream = client.generate("a", max_tokens=max_tokens, temperature=0.8, seed=control.rehearsal)
        try:
            result = await stream.result()
            break
        except Busy as busy:  # other clients were faster
            await asyncio.sleep(busy.retry_after or _RETRY_S)
    if result.finish_reason not in ("length", "stop"):
        raise DaemonError(f"it ended by {result.finish_reason!r}")
    await control.rehearsed.wait()
    control.rehearsed.clear()


async def _wait(
    request: asyncio.Future[None], control: ControlPlane, progress: Callable[[], int], heed: Callable[[], None]
) -> None:
    """Until `request` is over. Raises DaemonError once nothing has moved for the limit, or the control plane fails."""
    loop = asyncio.get_running_loop()
    seen, since = progress(), loop.time()
    while not request.done():
        await asyncio.wait({request}, timeout=_LOOK_S)
        heed()
        if control.failure is not None:
            raise DaemonError(f"the control plane takes no more messages: {control.failure}")
        now, moved = loop.time(), progress()
        if moved != seen:
            seen, since = moved, now
        elif now - since > LIMIT_S and not request.done():
            raise DaemonError(f"no answer within {LIMIT_S:g} s (the engine is {control.health()})")
