"""Text to token ids: the bundle's tokenizer and its chat template, as transformers applies them.

Ids to text is not here: the io thread does that from vocab.bin, without Python.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HuggingFaceTokenizer

from ull.access import unreadable
from ull.errors import RequestError, TokenizerError
from ull.wire import Message

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Unicode normalisation (NFC, NFKC) can shorten a text; composed characters need at most this many times the bytes.
_NORMALIZER_SHRINK = 4


class Tokenizer:
    """The tokenizer of one bundle. `encode` and `encode_chat` are pure and may run in any thread.

    `directory` is the bundle's `tokenizer/`. Raises TokenizerError naming the file that is missing or broken.
    """

    def __init__(self, directory: Path) -> None:
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _load_json(directory / "tokenizer_config.json")
        self._specials = _special_tokens(config)
        bos = self._specials.get("bos_token")
        self.bos_id: int | None = self._tokenizer.token_to_id(bos) if bos is not None else None
        self._template = _compile_template(_find_template(directory, config))
        longest = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
        # Bytes of text that one token covers at most.
        self.bytes_per_token = longest * (_NORMALIZER_SHRINK if self._tokenizer.normalizer is not None else 1)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` is possible."""
        return self._template is not None

    @property
    def vocabulary(self) -> int:
        """Number of tokens, special ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`, found without tokenizing it.

        No token covers more bytes than the longest entry of the vocabulary. That refuses a prompt of megabytes at
        once, where tokenizing it would take seconds.
        """
        return len(text.encode()) // self.bytes_per_token

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt; never two BOS in front, even if the text itself begins with one.

        Whether there is one, tokenizer.json decides: like transformers, this ignores `add_bos_token`.
        """
        ids = self._encode(text, add_special_tokens=True)
        start = 0
        while self.bos_id is not None and ids[start : start + 2] == [self.bos_id, self.bos_id]:
            start += 1
        return ids[start:]

    def render(self, messages: Sequence[Message]) -> str:
        """The chat template applied to `messages`, up to where the assistant's answer begins.

        Raises RequestError (field "messages") if there is no template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError("bad_request", "this engine has no chat template; send a prompt instead", "messages")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._specials)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise RequestError("bad_request", f"the chat template refuses the messages: {error}", "messages") from error

    def encode_chat(self, text: str) -> list[int]:
        """The ids of a rendered chat. The template has written BOS where the model wants one: none is added."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, special tokens left out unless asked for (streams never come this way)."""
        # The batch call releases the GIL.
        return str(self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call releases the GIL, `encode` does not (measured with tokenizers 0.23); "fast" leaves out the
        # offsets, which nobody reads here.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def _load_tokenizer(path: Path) -> HuggingFaceTokenizer:
    try:
        return HuggingFaceTokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise TokenizerError(unreadable(path, error), "tokenizer.json") from error
    except Exception as error:  # the library raises bare Exception and ValueError alike
        raise TokenizerError(f"{path} is not a tokenizer: {error}", "tokenizer.json") from error


def _load_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(unreadable(path, error), path.name) from error
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot read {path}: {error}", path.name) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object", path.name)
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens that templates may use; each is a string or an object with `content`."""
    specials: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            specials[name] = value
    return specials


def _find_template(directory: Path, config: dict[str, Any]) -> str | None:
    """The chat template: chat_template.jinja, or tokenizer_config.json's string or list of named templates."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default", next(iter(named.values()), None))
    if value is not None and not isinstance(value, str):
        raise TokenizerError("chat_template is neither a string nor a list of named templates", "chat_template")
    return value


def _compile_template(source: str | None) -> jinja2.Template | None:
    """Compiles a template with the extensions and globals that transformers offers to it."""
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template does not compile: {error}", "chat_template") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Plain JSON; jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
