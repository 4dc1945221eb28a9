"""The web server: uvicorn on uvloop, with our bounds, on a socket that is bound already."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from ull.gateway.protocol import bounded

KEEP_ALIVE_S = 75
MAX_WEBSOCKET_BYTES = 1 << 20
BACKLOG = 1024


def serve(
    make: Callable[[], ASGIApp], listener: socket.socket, max_connections: int, read_timeout: float, shutdown_s: int
) -> None:
    """Serves until SIGINT or SIGTERM; what is under way then has `shutdown_s` seconds. Prints READY and the address."""
    config = uvicorn.Config(
        make,
        factory=True,
        loop="uvloop",
        http=bounded(max_connections, read_timeout),
        ws="websockets-sansio",
        ws_max_size=MAX_WEBSOCKET_BYTES,
        backlog=BACKLOG,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=shutdown_s,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _handled)  # uvicorn raises what has stopped it once more, when it has stopped
    Server(config).run(sockets=[listener])


def _handled(_number: int, _frame: object) -> None:
    """The signal has had its effect."""


class Server(uvicorn.Server):
    """Says where it serves once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to serve."""
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            print(f"READY http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
