"""Which of an answer's text may be sent while a call of a tool may still come: the text of a call is no content.

The daemon reads the calls and says so at the end. Until then what may be a call, in any of the forms that
`ull.text.tool_calls` knows, is held back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ull.text.tool_calls import HERMES, MISTRAL, PYTHON

_MARKERS = (HERMES, MISTRAL, PYTHON)
_LIST_OF_CALLS = re.compile(r"\[\s*(?:\{|\Z)")
_OPENERS = re.compile(r"[<\[{]")
_WORD_START = re.compile(r"\S+$")
_THOUGHT_END = "</think>"


class CallGuard:
    """The text of one answer, and how much of it may be sent. `names` are those of the request's tools."""

    @classmethod
    def of(cls, tools: Iterable[Mapping[str, Any]] | None, tool_choice: object) -> CallGuard | None:
        """The guard of a request with these tools; None where its answer can have no calls."""
        if not tools or tool_choice == "none":
            return None
        functions = [tool.get("function", tool) for tool in tools]
        return cls([str(each.get("name", "")) for each in functions if isinstance(each, Mapping)])

    def __init__(self, names: Collection[str]) -> None:
        self._names = tuple(names)
        self._text = ""
        self._sent = 0
        self._scanned = 0  # no call begins in front of it
        self._held = False  # a call has surely begun

    def add(self, text: str) -> str:
        """Takes in what has come; returns what may be sent of it."""
        self._text += text
        if self._held:
            return ""
        safe = self._safe()
        ready, self._sent, self._scanned = self._text[self._sent : safe], safe, safe
        return ready

    def rest(self, content: str | None, called: bool) -> str:
        """What of the content has not been sent, once all has come: `content` where there are calls, else all of it."""
        if not called:
            return self._text[self._sent :]
        whole = (content or "").strip()
        sent = self._text[: self._sent].lstrip()
        if not whole.startswith(sent):
            sent = sent.rstrip()
        return whole[len(sent) :] if whole.startswith(sent) else ""

    def _safe(self) -> int:
        """How much of the text holds no call and no beginning of one."""
        for match in _OPENERS.finditer(self._text, self._scanned):
            start = match.start()
            behind = self._text[start:]
            begins = any(behind.startswith(marker) for marker in _MARKERS)
            if begins or self._may_begin(match[0], start, behind):
                self._held = begins
                return self._word_start(start)
        return self._word_start(len(self._text))

    def _may_begin(self, opener: str, start: int, behind: str) -> bool:
        if any(marker.startswith(behind) for marker in _MARKERS):
            return True
        if opener == "{":
            before = self._text[:start].rstrip()
            return not before or before.endswith(_THOUGHT_END) or self._named(start)
        if opener == "[":
            return _LIST_OF_CALLS.match(behind) is not None or self._named(start)
        return False

    def _named(self, start: int) -> bool:
        """Whether a tool's name stands in front: `name[ARGS]{` is a call, and `[ARGS]` may have no text."""
        return any(self._text[max(0, start - len(name)) : start] == name for name in self._names)

    def _word_start(self, end: int) -> int:
        """Where the word in front of `end` begins, if it may be a tool's name, else `end`."""
        match = _WORD_START.search(self._text, self._scanned, end)
        if match is None:
            return end
        word = match[0]
        longest = max((len(name) for name in self._names), default=0)
        for length in range(min(len(word), longest), 0, -1):
            if any(name.startswith(word[-length:]) for name in self._names):
                return end - length
        return end
