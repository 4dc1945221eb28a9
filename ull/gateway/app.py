"""The gateway as an ASGI application: its routes, who may use them, and what is said of each request in the log."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from ull.errors import UllError
from ull.gateway.daemon import Daemon
from ull.gateway.doors import Doors, Settings
from ull.gateway.errors import HttpError, as_http
from ull.gateway.exchange import Exchange, HungUp
from ull.gateway.keys import Keys
from ull.gateway.retell import POLICY_VIOLATION, TRY_AGAIN, Call, CallSettings
from ull.log import Log
from ull.metrics.exposition import encode

PAGE = Path(__file__).parent / "page"
EVERYBODY = ""  # owns all requests where no keys are asked for
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SECURITY = [
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
Serve = Callable[[Exchange], Awaitable[dict[str, Any]]]


def make_app(daemon: Daemon, settings: Settings, keys: Keys | None, log: Log, calls: CallSettings) -> ASGIApp:
    """The application. `keys`: None lets everybody in. `calls`: what agents are told in calls of Retell's."""
    doors = Doors(daemon, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await daemon.close()

    def door(path: str, serve: Serve) -> Route:
        return Route(path, Door(serve, keys, log, settings.stall_timeout), methods=["POST"])

    async def models(exchange: Exchange) -> dict[str, Any]:
        name = exchange.scope["path_params"].get("name")
        engine = await daemon.engine()
        if name not in (None, engine.name):
            raise HttpError(404, f"there is no model {name!r:.100}", code="model_not_found", param="model")
        served = {
            "id": engine.name,
            "object": "model",
            "created": 0,
            "owned_by": "ull",
            "max_model_len": engine.limits["context"],
            "ull": {"engine": engine.engine, "executor": engine.executor, "limits": engine.limits},
        }
        await exchange.answer(200, served if name else {"object": "list", "data": [served]})
        return {}

    async def health(_request: Request) -> Response:
        state = await daemon.health()
        return _json_response(200 if state["status"] == "ok" else 503, state)

    async def metrics(exchange: Exchange) -> dict[str, Any]:
        accept = dict(exchange.scope["headers"]).get(b"accept", b"").decode("latin-1")
        text, content_type = encode(await daemon.metrics(), accept)
        await exchange.answer_text(200, text, content_type)
        return {}

    async def index(_request: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers={"cache-control": "no-cache"})

    async def retell(websocket: WebSocket) -> None:
        try:
            name = _owner(websocket.scope, keys, websocket.path_params.get("key"))
            await daemon.engine()
        except UllError as error:
            await websocket.close(POLICY_VIOLATION if isinstance(error, HttpError) else TRY_AGAIN, error.message[:120])
            return
        call = Call(websocket, daemon.owner(name).client, calls, log)
        started = time.monotonic()
        await call.run()
        told = {"call": websocket.path_params["call_id"][:64], "owner": name or None, "answers": call.answers}
        log.info("call", **told, s=round(time.monotonic() - started, 3))

    reader = Door(models, keys, log, settings.stall_timeout)
    routes = [
        door("/v1/chat/completions", doors.chat),
        door("/v1/completions", doors.completions),
        door("/v1/responses", doors.responses),
        Route("/v1/models", reader, methods=["GET"]),
        Route("/v1/models/{name:path}", reader, methods=["GET"]),
        WebSocketRoute("/retell/{call_id}", retell),
        WebSocketRoute("/retell/{key}/{call_id}", retell),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", Door(metrics, keys, log, settings.stall_timeout, quiet=True), methods=["GET"]),
        Route("/", index, methods=["GET"]),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _refused})
    return Envelope(app)


class Envelope:
    """Gives each request its id, and each answer the headers that all have."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["state"]["request_id"] = request_id.decode()

        async def put(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id), *_SECURITY]
            await send(message)

        await self._app(scope, receive, put)


class Door:
    """An endpoint whose requests are asked for their key, and whose errors are OpenAI's."""

    def __init__(self, serve: Serve, keys: Keys | None, log: Log, stall_s: float, quiet: bool = False) -> None:
        self._quiet = quiet  # what goes well has no line in the log
        self._serve = serve
        self._keys = keys
        self._log = log
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._stall_s)
        told: dict[str, Any] = {}
        try:
            try:
                scope["state"]["owner"] = _owner(scope, self._keys)
                told = await self._serve(exchange)
            except HungUp:
                raise
            except Exception as error:
                refusal = as_http(error)
                told = {"code": refusal.code, "message": refusal.message[:200]}
                if not isinstance(error, UllError):
                    told["error"] = f"{type(error).__name__}: {error}"[:500]
                await exchange.fail(refusal)
        except HungUp:
            told = {"finish": "cancelled"}
        self._say(exchange, scope, told)

    def _say(self, exchange: Exchange, scope: Scope, told: dict[str, Any]) -> None:
        """The log's line of a request."""
        event = {
            "id": exchange.request_id,
            "path": scope["path"][:100],
            "status": exchange.status,
            "owner": scope["state"].get("owner") or None,
            "ms": round((time.monotonic() - exchange.started) * 1000, 3),
            **told,
        }
        level = self._log.error if "error" in told else self._log.debug if self._quiet and not told else self._log.info
        level("request", **{name: value for name, value in event.items() if value is not None})


def _owner(scope: Scope, keys: Keys | None, in_path: str | None = None) -> str:
    """Who asks. Raises HttpError: no key, or nobody's. `in_path`: the key of one who can send no header."""
    if keys is None:
        return EVERYBODY
    given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    if in_path is not None:
        given = f"Bearer {in_path}"
    kind, _, key = given.partition(" ")
    name = keys.owner(key.strip()) if kind.lower() == "bearer" else None
    if name is None:
        what = "the API key is not valid" if given else "an API key is needed: send `Authorization: Bearer KEY`"
        raise HttpError(401, what, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    return name


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return b"req_" + secrets.token_hex(12).encode()


async def _refused(_request: Request, error: Exception) -> Response:
    """What Starlette refuses by itself, in the same form: no such path, or not this method."""
    assert isinstance(error, HTTPException)
    message = {404: "there is no such path", 405: "the path takes another method"}.get(error.status_code, error.detail)
    refusal = HttpError(error.status_code, message, code="not_found" if error.status_code == 404 else None)
    return _json_response(error.status_code, refusal.body(), dict(error.headers or {}))


def _json_response(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
