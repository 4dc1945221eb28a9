"""The sessions of all clients: the token ids that each holds, which of them were answers, and what waits for it.

A session is a list of ids and nothing else. The engine does not know of it: a request in a session is one whose prompt
begins with these ids, and the prefix cache finds what was computed for them, as long as there was room for it.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ull.daemon.config import PAGE_TOKENS
from ull.daemon.succession import HandedSession
from ull.daemon.turn import Turn
from ull.errors import RequestError
from ull.wire import MAX_ID, Generate

MAX_WAITING = 16  # messages that may wait for one session

_pack = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Step:
    """A message for a session that waits until those before it have been carried out. `turn`: of a `generate`."""

    identity: bytes
    request_id: int
    carry_out: Callable[[], None]
    turn: Turn | None = None


@dataclass(slots=True)
class Session:
    """What one session holds. What is being done to it is said by `turn` and `reserved`, and both may be nothing."""

    number: int
    pin: int = 0  # the key of its pinned KV cache; 0: none
    ids: array[int] = field(default_factory=lambda: array("i"))
    turn: Turn | None = None  # the `generate` that is under way in it
    reserved: bool = False  # something else is: it is being forked into, or cut in a worker
    waiting: deque[Step] = field(default_factory=deque)
    pinned_tokens: int = 0  # at most so many are pinned under its key
    closed: bool = False  # it is nobody's any more; what was sent for it before is still carried out
    warned: bool = False  # the log has said once that the template does not keep its answers
    _answers: list[tuple[int, int]] = field(default_factory=list)  # [begin, end) in ids, in order
    _chat: bytes | None = None  # digest of the chat that was rendered last, ...
    _chat_messages: int = 0  # ... which had so many messages

    @property
    def blocked(self) -> bool:
        """Whether the next message has to wait. An answer that is held makes nobody wait: it is dropped."""
        return self.reserved or (self.turn is not None and not self.turn.held)

    @property
    def last_answer(self) -> tuple[int, int]:
        """Where in `ids` the last thing that was generated begins and ends. Raises RequestError if there is none."""
        if not self._answers:
            raise RequestError("bad_request", f"session {self.number} holds no answer to truncate", "session")
        return self._answers[-1]

    def complete(self, request: Generate, prompt: array[int], completion: Sequence[int]) -> None:
        """Makes it hold a request's prompt and completion, which is its last answer unless the prompt was only read."""
        self._forget_answers(self._common(prompt))
        self.ids = prompt
        self._chat_messages = len(request.messages or ())
        self._chat = _digest(request, self._chat_messages) if request.messages else None
        if request.max_tokens == 0:
            return
        begin = len(prompt)
        self.ids.extend(completion)
        if self._answers and self._answers[-1] == (begin, begin):
            self._answers.pop()  # an empty one; so there are never more than ids
        self._answers.append((begin, len(self.ids)))

    def rolled_back(self, prompt: array[int]) -> int:
        """How many of its last tokens a prompt does not go on from."""
        return len(self.ids) - self._common(prompt)

    def roll_back(self, tokens: int) -> None:
        """Takes the last `tokens` off. Raises RequestError if it does not hold so many."""
        if not 0 <= tokens <= len(self.ids):
            raise RequestError(
                "bad_request", f"tokens must be from 0 to the {len(self.ids)} that the session holds", "tokens"
            )
        if tokens:
            self._forget_answers(len(self.ids) - tokens)
            del self.ids[len(self.ids) - tokens :]

    def truncate(self, answer: Sequence[int]) -> None:
        """Ends it with `answer` in place of its last answer and all that came behind it."""
        begin, _ = self.last_answer
        del self.ids[begin:]
        self.ids.extend(answer)
        self._answers[-1] = (begin, len(self.ids))

    def fork(self, into: Session) -> None:
        """Makes `into` hold the same."""
        into.ids = self.ids[:]
        into._answers = self._answers[:]
        into._chat, into._chat_messages = self._chat, self._chat_messages

    def save(self) -> HandedSession:
        """What a successor goes on with; nothing must be under way in it."""
        return HandedSession(
            number=self.number,
            pinned=self.pin != 0,
            ids=self.ids.tobytes(),
            answers=self._answers,
            chat=self._chat,
            chat_messages=self._chat_messages,
            warned=self.warned,
        )

    def restore(self, saved: HandedSession) -> None:
        """Makes it hold what a predecessor's session held."""
        self.ids = array("i", saved.ids)
        self._answers = list(saved.answers)
        self._chat, self._chat_messages = saved.chat, saved.chat_messages
        self.warned = saved.warned

    def is_answered_in(self, request: Generate) -> bool:
        """Whether a chat is the one that was rendered last, an assistant's answer behind it, and more."""
        messages, before = request.messages or [], self._chat_messages
        answered = before < len(messages) and messages[before].role == "assistant"
        return self._chat is not None and answered and _digest(request, before) == self._chat

    def _common(self, prompt: array[int]) -> int:
        """The length of the longest prefix that `ids` and a prompt have in common."""
        most = min(len(self.ids), len(prompt))
        different = np.array(self.ids[:most]) != np.array(prompt[:most])
        return int(different.argmax()) if different.any() else most

    def _forget_answers(self, kept: int) -> None:
        """Forgets what lies behind the first `kept` ids; an answer of which something is left stays the last one."""
        if kept == len(self.ids):
            return
        while self._answers and self._answers[-1][0] >= kept:
            self._answers.pop()
        if self._answers:
            begin, end = self._answers[-1]
            self._answers[-1] = (begin, min(end, kept))


class Sessions:
    """The sessions of every client, by the client's identity and its number for them.

    `per_client` and `total` bound how many there may be, `pinned` how many whose KV cache is pinned, `pinned_tokens`
    how much of it.
    """

    def __init__(self, per_client: int, total: int, pinned: int, pinned_tokens: int) -> None:
        self._per_client = per_client
        self._total = total
        self._pinned = pinned
        self._pinned_tokens = pinned_tokens
        self._clients: dict[bytes, dict[int, Session]] = {}
        self._keys = itertools.count(1)
        self.open_now = 0

    def open(self, identity: bytes, number: int, field: str = "session", pin: bool = False) -> Session:
        """A new session, which holds nothing. Raises RequestError, of `field`: it exists, or there are too many."""
        own = self._clients.get(identity, {})
        if not 0 <= number <= MAX_ID:
            raise RequestError("bad_request", f"{field} must be from 0 to 2^64 - 1", field)
        if number in own:
            raise RequestError("session_exists", f"session {number} of this client is open", field)
        if len(own) >= self._per_client:
            reason = f"this client has {len(own)} sessions open, as many as it may (sessions.per_client)"
            raise RequestError("too_many_sessions", f"{reason}; close one", field)
        if self.open_now >= self._total:
            reason = f"{self.open_now} sessions are open, as many as there may be (sessions.total)"
            raise RequestError("too_many_sessions", f"{reason}; close one", field)
        session = Session(number, next(self._keys) if pin else 0)
        self._clients.setdefault(identity, own)[number] = session
        self.open_now += 1
        return session

    def restore(self, identity: bytes, saved: HandedSession) -> None:
        """Opens a session that a predecessor had, whatever the limits are now."""
        session = Session(saved.number, next(self._keys) if saved.pinned else 0)
        session.restore(saved)
        self._clients.setdefault(identity, {})[saved.number] = session
        self.open_now += 1

    def find(self, identity: bytes, number: int) -> Session:
        """A client's session. Raises RequestError for one that is not open, or is another client's."""
        session = self._clients.get(identity, {}).get(number)
        if session is None:
            raise RequestError("unknown_session", f"this client has no session {number} open", "session")
        return session

    def close(self, identity: bytes, session: Session) -> None:
        """Takes a client's session out. Its number may be used again."""
        own = self._clients[identity]
        del own[session.number]
        if not own:
            del self._clients[identity]
        self.open_now -= 1
        session.closed = True

    def of(self, identity: bytes) -> list[Session]:
        """The sessions of a client."""
        return list(self._clients.get(identity, {}).values())

    def check_pins(self, session: Session, tokens: int) -> None:
        """Raises RequestError where `tokens` of a session are more than may be pinned beside the others'."""
        others = [_in_pages(other.pinned_tokens) for other in self if other is not session and other.pinned_tokens]
        if len(others) >= self._pinned:
            reason = f"{len(others)} sessions are pinned, as many as may be: raise engine.sessions, or close one"
            raise RequestError("pins_full", f"session {session.number}: {reason}", "session")
        if sum(others) + _in_pages(tokens) > self._pinned_tokens:
            reason = f"{_in_pages(tokens)} tokens of this session and {sum(others)} of others would be pinned"
            room = (
                f"there is room for {self._pinned_tokens} beyond one full context: raise engine.kv_pages, or close one"
            )
            raise RequestError("pins_full", f"session {session.number}: {reason}; {room}", "session")

    def __iter__(self) -> Iterator[Session]:
        for own in self._clients.values():
            yield from own.values()


def _in_pages(tokens: int) -> int:
    """The tokens of as many pages as `tokens` take."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS


def _digest(request: Generate, messages: int) -> bytes:
    """Stands for the first messages of a chat, and for what else its template is given."""
    chat = ((request.messages or [])[:messages], request.tools, request.documents, request.chat_template_kwargs)
    return hashlib.blake2b(_pack(chat), digest_size=16).digest()
