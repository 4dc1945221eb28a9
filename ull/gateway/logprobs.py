"""Log-probabilities in OpenAI's words, which have the texts of tokens where the wire has their ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ull.client import AsyncClient
from ull.wire import TokenLogprob

_REPLACEMENT = "\ufffd"


class TokenTexts:
    """The texts of one engine's tokens, asked for once each."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    async def learn(self, client: AsyncClient, entries: Sequence[TokenLogprob]) -> None:
        """Asks for the texts of all tokens in `entries` that are not known yet."""
        wanted = {pair[0] for entry in entries for pair in entry.top} | {entry.token for entry in entries}
        unknown = [token for token in wanted if token not in self._texts]
        if not unknown:
            return
        texts = await asyncio.gather(*(client.detokenize([token], skip_special_tokens=False) for token in unknown))
        self._texts.update(zip(unknown, texts, strict=True))

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
            "top_logprobs": [{self._texts[int(token)]: value for token, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._texts[token]
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None if _REPLACEMENT in text else list(text.encode()),
        }
