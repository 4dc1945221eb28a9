"""Sessions: conversations that the daemon keeps for one connection, so that each turn reads only what is new.

with client.open_session() as session:
    session.append("A question that is still being asked")
    answer = session.generate(", and its last words").result()
    session.truncate(characters=40)  # of the answer, which was interrupted
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Unpack, cast

from ull import wire
from ull.client.options import GenerateOptions, ReadOptions, names_options
from ull.client.protocol import SessionState
from ull.client.requests import Prompt, build_reading, build_request, build_rollback, build_truncate

if TYPE_CHECKING:
    from ull.client.aio import AsyncClient, AsyncStream
    from ull.client.sync import Client, Stream


class _Known:
    """What either client knows of a session without asking."""

    _state: SessionState

    @property
    def id(self) -> int:
        """The session's number on the wire."""
        return self._state.id

    @property
    def open(self) -> bool:
        """Whether it can still be used: neither closed nor lost with its connection, as far as is known here."""
        return self._state.failure is None

    @property
    def tokens(self) -> int:
        """How many tokens it holds, as the daemon has last said in an answer that was received."""
        return self._state.tokens


class Session(_Known):
    """A list of token ids at the daemon, to which prompts and answers are added. From `Client.open_session`.

    What is asked of a session is carried out in the order in which it was asked. Nothing needs to be waited for:
    `generate` and `append` return at once, the others after one round trip.

    Leaving a `with` block, close() or dropping the last reference closes it, which cancels what runs in it. It also
    ends with the client's connection: its methods then raise ConnectionLost, and what a new session is sent again is
    found in the prefix cache. After close() they raise RequestError of the code unknown_session.
    After an interrupt (Ctrl-C) in one of its methods, what was asked for may have been carried out.
    """

    def __init__(self, client: Client, state: SessionState) -> None:
        self._client = client
        self._state = state
        client._guard(self, state)

    @names_options(GenerateOptions)
    def generate(self, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """As `Client.generate`, behind what the session holds; prompt and answer are added to it.

        prompt: a text or token ids, which are appended; or a list of messages, the whole conversation, of which the
        session keeps what is the same (`usage.rolled_back_tokens` says what was not). None: goes on from what is there.
        An answer of `hold=True` belongs to the session from its commit() on; anything else asked of it drops one that
        is held.
        """
        client = self._client
        return client._start(build_request(client._protocol.new_id(), prompt, options, self.id), self)

    @names_options(ReadOptions)
    def append(self, prompt: Prompt, **options: Unpack[ReadOptions]) -> Stream:
        """Adds a prompt, which is read at once: what comes later need not wait for it.

        The stream has no tokens; its `result().usage` says what was read. It may be dropped. If the prompt was refused
        and nobody has asked, what was sent for the session behind it fails with the reason, or else the next call does.
        """
        client = self._client
        request = build_reading("append", client._protocol.new_id(), prompt, options, self.id)
        return client._start(request, self, detached=True)

    def rollback(self, tokens: int) -> int:
        """Takes the last `tokens` tokens off; returns how many are left. Raises RequestError: it holds fewer."""
        return self._ask(build_rollback(self._client._protocol.new_id(), self.id, tokens))

    def truncate(self, tokens: int | None = None, characters: int | None = None) -> int:
        """Keeps so much of the last answer: its first `tokens`, or the first `characters` of its text.

        Returns how many tokens the session holds then. Raises RequestError: not exactly one of them, no answer, or
        more than it has.
        """
        return self._ask(build_truncate(self._client._protocol.new_id(), self.id, tokens, characters))

    def fork(self) -> Session:
        """Another session that holds the same; the two share their KV cache. Raises RequestError: too many sessions."""
        client = self._client
        other = Session(client, SessionState(client._protocol.new_id()))
        client._open(other, wire.Fork(id=client._protocol.new_id(), session=self.id, to=other.id), self)
        return other

    def close(self) -> None:
        """Ends the session, and what runs in it. It waits for nothing, and a second time it does nothing."""
        self._state.close()
        if self._client._protocol.find(self.id) is self._state:
            self._client._end_surely(self._state)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_state"):
            self.close()

    def _ask(self, request: wire.Rollback | wire.Truncate) -> int:
        return cast("wire.SessionReply", self._client._ask(request, self._state)).tokens


class AsyncSession(_Known):
    """As `ull.Session`, with `async with`; `generate`, `append` and `close` return at once, the others are awaited."""

    def __init__(self, client: AsyncClient, state: SessionState) -> None:
        self._client = client
        self._state = state

    @names_options(GenerateOptions)
    def generate(self, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """As `ull.Session.generate`."""
        client = self._client
        return client._start(build_request(client._protocol.new_id(), prompt, options, self.id), self)

    @names_options(ReadOptions)
    def append(self, prompt: Prompt, **options: Unpack[ReadOptions]) -> AsyncStream:
        """As `ull.Session.append`."""
        client = self._client
        request = build_reading("append", client._protocol.new_id(), prompt, options, self.id)
        return client._start(request, self, detached=True)

    async def rollback(self, tokens: int) -> int:
        """As `ull.Session.rollback`."""
        return await self._ask(build_rollback(self._client._protocol.new_id(), self.id, tokens))

    async def truncate(self, tokens: int | None = None, characters: int | None = None) -> int:
        """As `ull.Session.truncate`."""
        return await self._ask(build_truncate(self._client._protocol.new_id(), self.id, tokens, characters))

    async def fork(self) -> AsyncSession:
        """As `ull.Session.fork`."""
        client = self._client
        other = AsyncSession(client, SessionState(client._protocol.new_id()))
        await client._open(other, wire.Fork(id=client._protocol.new_id(), session=self.id, to=other.id), self)
        return other

    def close(self) -> None:
        """As `ull.Session.close`."""
        self._state.close()
        if self._client._protocol.find(self.id) is self._state:
            self._client._end_soon(self._state)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_state"):
            self.close()

    async def _ask(self, request: wire.Rollback | wire.Truncate) -> int:
        return cast("wire.SessionReply", await self._client._ask(request, self._state)).tokens
