"""Log-probabilities in OpenAI's words, which have the texts of tokens where the wire has their ids."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

from ull.client import AsyncClient
from ull.client.protocol import Result
from ull.wire import TokenLogprob

_REPLACEMENT = "\ufffd"
_AT_ONCE = 256  # questions under way


class TokenTexts:
    """The texts of one engine's tokens, asked for once each."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    async def learn(self, client: AsyncClient, entries: Sequence[TokenLogprob], others: Collection[int] = ()) -> None:
        """Asks for the texts of all tokens in `entries` and `others` that are not known yet."""
        wanted = {pair[0] for entry in entries for pair in entry.top} | {entry.token for entry in entries}
        unknown = [token for token in wanted.union(others) if token not in self._texts]
        for first in range(0, len(unknown), _AT_ONCE):
            some = unknown[first : first + _AT_ONCE]
            texts = await asyncio.gather(*(client.detokenize([token], skip_special_tokens=False) for token in some))
            self._texts.update(zip(some, texts, strict=True))

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` of a chat's choice."""
        return {
            "content": [
                self._entry(entry.token, entry.logprob)
                | {"top_logprobs": [self._entry(int(token), value) for token, value in entry.top]}
                for entry in entries
            ],
            "refusal": None,
        }

    def echoed(self, ids: Sequence[int], result: Result, bos: int | None) -> dict[str, Any]:
        """`logprobs` of a plain completion's prompt and of what follows it, as far as they are known.

        `bos`: the id that takes no room in the text.
        """
        texts = [self._texts[token] for token in ids]
        widths = (0 if token == bos else len(text) for token, text in zip(ids, texts, strict=True))
        *offsets, end = accumulate(widths, initial=0)
        known = result.prompt_logprobs or []
        tops = [None if top is None else self._top(top) for top in result.prompt_top_logprobs or []]
        prompt: dict[str, list[Any]] = {
            "tokens": texts,
            "token_logprobs": [*known, *[None] * (len(ids) - len(known))],
            "top_logprobs": [*tops, *[None] * (len(ids) - len(tops))],
            "text_offset": offsets,
        }
        behind = self.plain(result.logprobs or [], end)
        return {name: [*entries, *behind[name]] for name, entries in prompt.items()}

    def plain(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """`logprobs` of a plain completion's choice; `offset`: characters of the text in front of it."""
        texts = [self._texts[entry.token] for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._top(entry.top) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Alternatives by their texts: of two with the same the likelier counts, which comes first."""
        return {self._texts[int(token)]: value for token, value in reversed(top)}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts[token]
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if _REPLACEMENT in text else list(text.encode()),
        }
