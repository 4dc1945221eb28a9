"""One conversation of a voice agent: what is heard is read ahead, what is likely a whole turn is answered ahead.

conversation = Conversation(client)
conversation.read_ahead(chat)                  # of an interim transcript, as often as there is one
conversation.expect(chat, max_tokens=200)      # this is likely the whole turn: its answer is computed, and held
stream = await conversation.answer(chat, max_tokens=200)  # it was: what is there comes at once

Messages are the whole conversation each time. So nothing is lost where a session or a daemon goes away, and what was
not spoken aloud is left out of the next messages, as voice frameworks do. None of it changes an answer: its tokens
depend on its messages and options alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack, cast

from ull.client.aio import AsyncClient, AsyncStream
from ull.client.options import GenerateOptions, ReadOptions, prompt_options
from ull.client.sessions import AsyncSession
from ull.errors import ConnectionLost, RequestError, UllError

Messages = Sequence[Mapping[str, Any]]
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")  # of a message, that are passed on


class _Ahead(NamedTuple):
    """An answer that is computed and held."""

    messages: list[Mapping[str, Any]]
    options: GenerateOptions
    stream: asyncio.Task[AsyncStream]


class Conversation:
    """A conversation over one session of `client`, opened when it is needed, and again when it was lost.

    Where the daemon has no session to give, answers come without one, and nothing is read ahead. All calls are made in
    the client's event loop. pin: the session's KV cache is never given up for others'.
    """

    def __init__(self, client: AsyncClient, *, pin: bool = False) -> None:
        self._client = client
        self._pin = pin
        self._session: AsyncSession | None = None
        self._opening = asyncio.Lock()
        self._wanted: tuple[list[Mapping[str, Any]], ReadOptions] | None = None  # to be read next
        self._reading: asyncio.Task[None] | None = None
        self._ahead: _Ahead | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False

    def read_ahead(self, messages: Messages, **options: Unpack[GenerateOptions]) -> None:
        """Has the daemon read what was heard so far. Of several calls in a row the last one counts; it never waits.

        Options that say nothing of the prompt are left out. What cannot be read is left to `answer` to complain of.
        """
        if self._closed:
            return
        heard = list(messages)
        if self._ahead is not None:
            if self._ahead.messages == heard:
                return
            self.withdraw()
        self._wanted = (heard, cast("ReadOptions", {**prompt_options(options), "add_generation_prompt": False}))
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read())

    def expect(self, messages: Messages, **options: Unpack[GenerateOptions]) -> None:
        """Begins an answer to what is likely the whole turn, and holds it for `answer`; it never waits.

        The same messages and options again change nothing. With `logprobs`, which cannot be held, it only reads ahead.
        """
        if self._closed:
            return
        turn = list(messages)
        if self._ahead is not None:
            if self._ahead.messages == turn and self._ahead.options == options:
                return
            self.withdraw()
        if options.get("logprobs") is not None:
            self.read_ahead(turn, **options)
            return
        self._wanted = None
        held = asyncio.ensure_future(self._generate(turn, {**options, "hold": True}))
        held.add_done_callback(_look_away)
        self._ahead = _Ahead(turn, options, held)

    def withdraw(self) -> None:
        """Drops an answer that is held: the turn goes on, or was another one."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ending = asyncio.ensure_future(_end(ahead.stream))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def answer(self, messages: Messages, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """The answer to these messages: the one that is held, if it is of the same messages and options; else anew.

        The stream is the caller's to cancel. Raises what `AsyncClient.generate` and its stream raise.
        """
        if self._closed:
            raise ConnectionLost("the conversation is closed")
        turn = list(messages)
        self._wanted = None
        ahead = self._ahead
        if ahead is not None and ahead.messages == turn and ahead.options == options:
            self._ahead = None
            with contextlib.suppress(UllError):  # it was dropped, or refused: then it is asked for once more
                stream = await ahead.stream
                await stream.commit()
                return stream
        self.withdraw()
        return await self._generate(turn, options)

    async def aclose(self) -> None:
        """Ends what runs, and the session. A second time it does nothing."""
        self._closed = True
        self._wanted = None
        self.withdraw()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await asyncio.gather(*self._endings, return_exceptions=True)
        if self._session is not None:
            self._session.close()

    async def _read(self) -> None:
        """Reads what is wanted, one after the other, until nothing is."""
        while (wanted := self._wanted) is not None:
            self._wanted = None
            messages, options = wanted
            with contextlib.suppress(UllError):
                session = await self._open()
                if session is None:
                    return
                await session.append(messages, **options).result()

    async def _generate(self, messages: list[Mapping[str, Any]], options: GenerateOptions) -> AsyncStream:
        """Asks for an answer in the session, once what is being read has been."""
        reading = self._reading
        if reading is not None and not reading.done():
            await asyncio.wait((reading,))  # a session takes its messages in order anyway
        for _ in range(2):
            session = await self._open()
            if session is None:
                break
            with contextlib.suppress(ConnectionLost):  # the session's, which has ended: open another
                return session.generate(messages, **options)
        return self._client.generate(messages, **options)

    async def _open(self) -> AsyncSession | None:
        """The session; None where the daemon has none to give. Raises ConnectionLost, RequestTimeout."""
        async with self._opening:
            if self._session is None or not self._session.open:
                try:
                    self._session = await self._client.open_session(pin=self._pin)
                except RequestError:
                    self._session = None
            return self._session


def as_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's form as the daemon takes it: fields that it does not know are left out."""
    kept = {name: message[name] for name in _FIELDS if message.get(name) is not None}
    if kept["role"] == "developer":
        kept["role"] = "system"
    return kept


async def _end(stream: asyncio.Task[AsyncStream]) -> None:
    """Cancels an answer that nobody wants, wherever it has come to."""
    with contextlib.suppress(UllError):
        (await stream).close()


def _look_away(task: asyncio.Task[AsyncStream]) -> None:
    """Counts a failure as seen: who asks for the answer is told of it, or asks anew."""
    if not task.cancelled():
        task.exception()
