"""The gateway's side of the daemon: a connection for each owner of a key, what the daemon serves, whether it does."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any

from prometheus_client.core import Metric

from ull.client import AsyncClient
from ull.client.aio import AsyncStream
from ull.client.options import GenerateOptions
from ull.client.requests import Prompt
from ull.client.sessions import AsyncSession
from ull.errors import ConnectionLost, RequestError, UllError
from ull.gateway.logprobs import TokenTexts
from ull.metrics.compat import vllm_families
from ull.metrics.families import families, unreachable

FRESH_S = 2.0  # what a daemon serves is asked for again after so long, ...
STALE_S = 10.0  # ... and after so long not used without an answer: the daemon may be another one
HEALTH_TIMEOUT_S = 1.0
METRICS_FRESH_S = 1.0  # for so long monitors get the same answer


class Engine:
    """What a daemon serves, as its `info` says."""

    def __init__(self, engine: dict[str, Any], executor: dict[str, Any], limits: dict[str, Any]) -> None:
        self.engine, self.executor, self.limits = engine, executor, limits
        self.name = str(engine["name"])
        self.digest = str(engine.get("digest", ""))
        self.texts = TokenTexts()

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: while it is the same, the same request and seed have the same answer."""
        return f"ull_{self.digest[:16]}"


class Owner:
    """The connection of those who share a key, and the sessions that they have named."""

    def __init__(self, url: str | None, connect_timeout: float) -> None:
        self.client = AsyncClient(url, connect_timeout=connect_timeout)
        self._sessions: OrderedDict[str, AsyncSession] = OrderedDict()  # those used last come last
        self._last: dict[str, AsyncStream] = {}  # of each session: its requests end in order
        self._opening = asyncio.Lock()

    async def generate(
        self, prompt: Prompt, options: GenerateOptions, session: str | None, most_sessions: int
    ) -> AsyncStream:
        """A request's stream; in the session of this name, if one is given and can be had."""
        if session is not None and (kept := await self._session(session, most_sessions)) is not None:
            try:
                self._last[session] = stream = kept.generate(prompt, **options)
                return stream
            except ConnectionLost:  # with which it has ended; the prefix cache may still have what it held
                self._forget(session)
        return self.client.generate(prompt, **options)

    async def _session(self, name: str, most: int) -> AsyncSession | None:
        async with self._opening:
            kept = self._sessions.get(name)
            if kept is not None and kept.open:
                self._sessions.move_to_end(name)
                return kept
            self._forget(name)
            if len(self._sessions) >= most and not self._make_room():
                return None
            try:
                self._sessions[name] = session = await self.client.open_session()
            except RequestError:  # all clients together have as many as there may be
                return None
            return session

    def _make_room(self) -> bool:
        """Closes the session that has been idle for longest."""
        for name in self._sessions:
            if name not in self._last or self._last[name].finished:
                self._forget(name)
                return True
        return False

    def _forget(self, name: str) -> None:
        self._last.pop(name, None)
        if (session := self._sessions.pop(name, None)) is not None:
            session.close()


class Daemon:
    """One daemon, to which every request goes."""

    def __init__(self, url: str | None, connect_timeout: float) -> None:
        self._url = url
        self._connect_timeout = connect_timeout
        self._owners: dict[str, Owner] = {}
        self._asking = AsyncClient(url, connect_timeout=connect_timeout)  # for what is asked in nobody's name
        self._engine: Engine | None = None
        self._asked = 0.0
        self._refreshing: asyncio.Task[Engine] | None = None
        self._health: asyncio.Task[dict[str, Any]] | None = None
        self._metrics: asyncio.Task[list[Metric]] | None = None

    @property
    def url(self) -> str:
        """The daemon's endpoint."""
        return self._asking.url

    def owner(self, name: str) -> Owner:
        """The connection of the owner of a key. Its requests take turns with those of others."""
        if name not in self._owners:
            self._owners[name] = Owner(self._url, self._connect_timeout)
        return self._owners[name]

    async def engine(self) -> Engine:
        """What the daemon serves. Raises ConnectionLost or RequestTimeout: it does not answer."""
        age = time.monotonic() - self._asked
        if self._engine is None or age > FRESH_S:
            if self._refreshing is None:
                self._refreshing = asyncio.ensure_future(self._refresh())
                self._refreshing.add_done_callback(self._refreshed)
            if self._engine is None or age > STALE_S:
                return await asyncio.shield(self._refreshing)
        return self._engine

    async def health(self) -> dict[str, Any]:
        """The daemon's own words on its health, or "unreachable". Those who ask at once share an answer."""
        if self._health is None:
            self._health = asyncio.ensure_future(self._ask_health())
            self._health.add_done_callback(self._forget_health)
        return await asyncio.shield(self._health)

    async def metrics(self) -> list[Metric]:
        """The daemon's figures, under our names and vLLM's. Those who ask at once share an answer."""
        if self._metrics is None:
            self._metrics = asyncio.ensure_future(self._ask_metrics())
            asyncio.get_running_loop().call_later(METRICS_FRESH_S, self._forget_metrics)
        return await asyncio.shield(self._metrics)

    async def close(self) -> None:
        """Ends all that runs."""
        for task in (self._refreshing, self._health, self._metrics):
            if task is not None:
                task.cancel()
        for client in (self._asking, *(owner.client for owner in self._owners.values())):
            await client.close()

    async def _refresh(self) -> Engine:
        reply = await self._asking.info()
        if self._engine is None or self._engine.digest != str(reply.engine.get("digest", "")):
            self._engine = Engine(reply.engine, reply.executor, reply.limits)
        else:
            self._engine.executor, self._engine.limits = reply.executor, reply.limits
        self._asked = time.monotonic()
        return self._engine

    def _refreshed(self, task: asyncio.Task[Engine]) -> None:
        self._refreshing = None
        if not task.cancelled() and isinstance(task.exception(), ConnectionLost):
            self._engine = None

    async def _ask_health(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                reply = await self._asking.health()
        except (UllError, TimeoutError):
            return {"status": "unreachable", "daemon": self.url}
        return {"status": reply.status, "uptime_s": reply.uptime_ns / 1e9, "queue_length": reply.queue_length}

    async def _ask_metrics(self) -> list[Metric]:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                health, info = await self._asking.health(), await self._asking.info()
                stats = await self._asking.stats(histograms=True)
        except (UllError, TimeoutError):
            return list(unreachable())
        return [*families(stats, health, info), *vllm_families(stats, info)]

    def _forget_metrics(self) -> None:
        self._metrics = None

    def _forget_health(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._health = None
