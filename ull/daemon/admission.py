"""Decides whether a generate request can be run, and turns it into what the engine takes; tokenizes and detokenizes.

Every refusal is a RequestError that names the field and says what would be right. Nothing here waits; what is slow of
long texts, `prompt_ids` and `convert`, is the caller's to place in a thread.
"""

from __future__ import annotations

import difflib
import math
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ull._native import LIMITS
from ull.daemon.grammars import FORMS, Source, forms_of, source_of
from ull.daemon.tools import ToolUse
from ull.errors import RequestError
from ull.text.cut import TextOf, cut, head_of
from ull.text.tokenizer import Tokenizer
from ull.wire import (
    DRAFTERS,
    MAX_ID,
    MAX_TREE,
    PRIORITIES,
    Detokenize,
    DetokenizeReply,
    Generate,
    Message,
    Prompted,
    Tokenize,
    TokenizeReply,
    Truncate,
)

# What the engine's request slots, of fixed size, have room for.
MAX_STOPS = LIMITS["stops"]
MAX_STOP_BYTES = LIMITS["stop_bytes"]
MAX_STOP_IDS = LIMITS["stop_ids"]  # the engine's EOS ids included
MAX_LOGIT_BIAS = LIMITS["logit_bias"]
MAX_LOGPROBS = LIMITS["logprobs"]
MAX_PROMPT_TOP_LOGPROBS = LIMITS["prompt_top_logprobs"]
MAX_CHOICES = LIMITS["choices"]
MAX_CHOICE_TOKENS = LIMITS["choice_tokens"]

MIN_TEMPERATURE = 1e-4  # below it, logits / temperature leaves float32
MAX_TEMPERATURE = 100.0
MAX_BIAS = 1e4
MAX_PENALTY = 2.0  # of frequency and presence, either way
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
_TOKENS_PER_MESSAGE = 2  # of a chat, at least: whose it is, and where it ends
MAX_TIMEOUT_MS = 24 * 3_600_000
MAX_ANSWER_BYTES = LIMITS["frame_text"]  # of the ids of `tokenize` and the text of `detokenize`
_ID_BYTES = 5  # of one id on the wire, at most
_DRAWN_SEED_BITS = 53  # what is an exact number in every language
_QUOTED = 1 << 16  # characters that a prompt counts as if it quotes control tokens: it takes longer to encode
_LABEL = 32  # characters that each of the choices counts beside its own
_ROLE = re.compile(r"[\w.\- ]{1,64}")  # some templates write it between the bars of a control token
_CHAT_FIELDS = ("tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_RESERVED_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)


# What choices leave no room for: the answer is one of the texts, whole, and how likely each is says the model alone.
_NOT_WITH_CHOICES: Mapping[str, Any] = {
    "max_tokens": None,
    "logprobs": None,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "stop": [],
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may ask of this daemon; reported by `info`."""

    context: int  # tokens of prompt and completion together
    vocabulary: int  # token ids are below it
    max_message_bytes: int = 16 << 20  # of one message; a longer one is refused
    default_max_tokens: int
    max_tokens: int
    max_stops: int = MAX_STOPS
    max_stop_bytes: int = MAX_STOP_BYTES
    max_stop_ids: int = MAX_STOP_IDS
    max_logit_bias: int = MAX_LOGIT_BIAS
    max_logprobs: int = MAX_LOGPROBS
    drafters: tuple[str, ...] = ("none", "suffix", "auto")  # what `speculate` may name on this engine
    default_drafter: str = "none"
    max_tree: int = MAX_TREE
    default_max_tree: int = 0  # 0: the executor's choice
    penalties: bool = True  # whether the executor applies them
    choices: bool = True  # whether the executor scores them
    max_choices: int = MAX_CHOICES
    max_choice_tokens: int = MAX_CHOICE_TOKENS  # of each
    prompt_logprobs: bool = True  # whether the executor scores prompts
    max_prompt_top_logprobs: int = MAX_PROMPT_TOP_LOGPROBS
    grammars: bool = True  # whether answers can be held to one
    max_grammar_bytes: int = LIMITS["grammar_bytes"]  # of a schema, an expression or a grammar
    max_sessions: int = 16  # of one client
    max_pinned_sessions: int = 0  # of all clients
    max_pinned_tokens: int = 0  # of these together, in full pages


class Admission:
    """The checks of one engine: its tokenizer, its limits, the ids that end its texts.

    `text_of` gives the text that a stream of ids has behind a prompt (default: what the tokenizer decodes).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        eos: Sequence[int],
        text_of: TextOf | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._text_of = self._decode if text_of is None else text_of
        self._eos = list(eos)
        self.limits = limits
        self.tools = ToolUse(tokenizer, eos, grammars=limits.grammars, most_bytes=limits.max_grammar_bytes)

    def check(self, request: Generate) -> None:
        """Raises RequestError for the first field that cannot be served; a text's length in tokens is not looked at."""
        self._check_prompt(request)
        self._check_ids(request)
        _check_sampling(request)
        self._check_penalties(request)
        self._check_stops(request)
        self._check_bias(request)
        limits = self.limits
        if request.max_tokens is not None and not 0 <= request.max_tokens <= limits.max_tokens:
            only = "0 (only read the prompt)"
            _refuse("max_tokens", f"must be from {only} to {limits.max_tokens}, not {request.max_tokens}")
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
            _refuse("logprobs", f"must be from 0 to {MAX_LOGPROBS}, not {request.logprobs}")
        if request.prompt_logprobs and not limits.prompt_logprobs:
            reason = "cannot be computed: this engine's executor scores no prompts (limits.prompt_logprobs of info)"
            _refuse("prompt_logprobs", f"{reason}; leave it out")
        if not 0 <= request.prompt_top_logprobs <= MAX_PROMPT_TOP_LOGPROBS:
            allowed = f"must be from 0 to {MAX_PROMPT_TOP_LOGPROBS}"
            _refuse("prompt_top_logprobs", f"{allowed}, not {request.prompt_top_logprobs}")
        if request.prompt_top_logprobs and not request.prompt_logprobs:
            _refuse("prompt_top_logprobs", "needs prompt_logprobs to be true")
        if request.seed is not None and not 0 <= request.seed <= MAX_ID:
            _refuse("seed", "must be from 0 to 2^64 - 1")
        _check_schedule(request)
        self._check_speculation(request)
        self._check_form(request)
        self.tools.check(request)

    def check_text(self, request: Tokenize | Detokenize) -> None:
        """As `check`, of a text or ids that are to be converted."""
        if isinstance(request, Tokenize):
            self._check_prompt(request)
            self.tools.check(request)
        else:
            self._check_vocabulary("token_ids", request.token_ids)
            if len(request.token_ids) > self.limits.context:
                raise RequestError(
                    "too_long",
                    f"token_ids: {len(request.token_ids)} are more than the context of {self.limits.context} holds; "
                    "send them in parts",
                    "token_ids",
                )

    def check_truncation(self, request: Truncate) -> None:
        """Raises RequestError unless exactly one of `tokens` and `characters` says what is kept."""
        given = [name for name in ("tokens", "characters") if getattr(request, name) is not None]
        if not given:
            _refuse("tokens", "is missing; send one of tokens, characters")
        if len(given) > 1:
            _refuse(given[1], f"and {given[0]} are both set; send exactly one")
        if getattr(request, given[0]) < 0:
            _refuse(given[0], f"must be 0 or more, not {getattr(request, given[0])}")

    def cut(self, prompt: list[int], answer: list[int], characters: int) -> list[int]:
        """The beginning of an answer behind its prompt, as `ull.text.cut`. Slow for long ones; thread-safe.

        Raises RequestError if its text has fewer `characters`.
        """
        return cut(prompt, answer, characters, self._text_of, self._tokenizer.encode_rest)

    def convert(self, request: Tokenize | Detokenize) -> TokenizeReply | DetokenizeReply:
        """The answer to a checked request. Slow for long texts and many ids; thread-safe.

        Raises RequestError as `prompt_ids` does, and for what does not fit an answer.
        """
        return self._tokenize(request) if isinstance(request, Tokenize) else self._detokenize(request)

    def prompt_size(self, request: Prompted | Detokenize) -> int:
        """How much work `prompt_ids` will be for a prompt, or `convert` for ids, in characters or ids."""
        if isinstance(request, Detokenize):
            return len(request.token_ids)
        labels = [len(text) + _LABEL for text in (request.choices or ())] if isinstance(request, Generate) else []
        prompt, more = request.prompt or "", sum(labels)
        if request.special_tokens or not self._tokenizer.quotes_control_tokens(prompt[:_QUOTED]):
            return len(prompt) + more
        return max(len(prompt), _QUOTED) + more

    def prompt_ids(self, request: Prompted, held: int = 0) -> list[int]:
        """The prompt's ids: given, encoded, or encoded after the chat template. Slow for long texts; thread-safe.

        A prompt or ids go on behind the `held` tokens of a session, and none may be given if there are any.
        Raises RequestError: too long (by how many tokens), or messages that the template refuses.
        """
        field = _prompt_field(request)
        if field == "session":
            if not held:
                _refuse("prompt", "is missing: the session holds nothing that could be gone on from")
            self._refuse_long(0, field, held)
            return []
        if isinstance(request, Generate) and request.token_ids is not None:
            ids = request.token_ids
        elif request.messages is not None:
            self.tools.check_template(request)
            chat = self._tokenizer.render(
                request.messages,
                tools=self.tools.rendered(request),
                documents=request.documents,
                variables=request.chat_template_kwargs,
                add_generation_prompt=_begins_answer(request),
                continue_final_message=request.continue_final_message,
                special_tokens=request.special_tokens,
            )
            self._refuse_hopeless(chat.text, "messages")
            ids = self._tokenizer.encode_chat(chat)
            held = 0  # they are the whole conversation
        else:
            ids = self._tokenizer.encode(request.prompt or "", request.special_tokens, add_special_tokens=not held)
        if not ids:
            _refuse(field, "has no tokens; send at least one")
        self._refuse_long(len(ids), field, held)
        return ids

    def grammar(self, request: Generate) -> Source | None:
        """The grammar that a checked request brings, if it does. Raises InvalidGrammar."""
        return source_of(request, self.limits.max_grammar_bytes)

    def labels(self, request: Generate, prompt: Sequence[int]) -> list[list[int]]:
        """The ids of the request's choices behind its whole prompt, whose text a client gets as they are.

        Slow for many; thread-safe. Raises RequestError for one that is too long, or that the vocabulary cannot spell.
        """
        choices = request.choices or []
        head = head_of(prompt, self._text_of) if choices else ()
        labels = [self._label(place, text, head) for place, text in enumerate(choices)]
        longest, room = max(map(len, labels), default=0), self.limits.context - len(prompt)
        if longest > room:
            reason = f"choices: the longest has {longest} tokens; the prompt of {len(prompt)} leaves room for {room}"
            raise RequestError("too_long", f"{reason} in the context of {self.limits.context}", "choices")
        return labels

    def _label(self, place: int, text: str, head: Sequence[int]) -> list[int]:
        tokenizer = self._tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False)
        if self._text_of(ids, head) != text:  # it was read as the beginning of a text, which it is not
            ids = next((rest for rest in tokenizer.encode_rest(text) if self._text_of(rest, head) == text), [])
        if not ids:
            _refuse_choice(place, f"{text[:40]!r} has no tokens whose text is the same; change it")
        if len(ids) > MAX_CHOICE_TOKENS:
            _refuse_choice(place, f"has {len(ids)} tokens; at most {MAX_CHOICE_TOKENS}: shorten it")
        return ids

    def most_tokens(self, request: Generate, labels: Sequence[Sequence[int]] = ()) -> int:
        """How long a checked request's completion may become, in tokens, if the context leaves as much.

        labels: of its choices.
        """
        if labels:
            return max(map(len, labels))
        return self.limits.default_max_tokens if request.max_tokens is None else request.max_tokens

    def parameters(
        self, request: Generate, received_ns: int, admitted_ns: int, labels: Sequence[Sequence[int]] = ()
    ) -> dict[str, Any]:
        """The engine's parameters for a checked request; a missing seed is drawn here. labels: of its choices."""
        return {
            "max_tokens": self.most_tokens(request, labels),
            "temperature": request.temperature,
            "top_k": min(request.top_k, self.limits.vocabulary),
            "top_p": request.top_p,
            "min_p": request.min_p,
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            "repetition_penalty": request.repetition_penalty,
            "seed": secrets.randbits(_DRAWN_SEED_BITS) if request.seed is None else request.seed,
            "stop": [text.encode() for text in request.stop],
            "stop_ids": self._stop_ids(request),
            "logit_bias": request.logit_bias,
            "logprobs": -1 if request.logprobs is None else request.logprobs,
            "prompt_logprobs": request.prompt_logprobs,
            "prompt_top_logprobs": request.prompt_top_logprobs,
            "timeout_ns": 0 if request.timeout_ms is None else received_ns + request.timeout_ms * 1_000_000,
            "deadline_ns": 0 if request.deadline_ms is None else received_ns + request.deadline_ms * 1_000_000,
            "priority": request.priority,
            "hold": request.hold,
            "received_ns": received_ns,
            "admitted_ns": admitted_ns,
            "speculate": request.speculate or self.limits.default_drafter,
            "max_tree": request.max_tree or self.limits.default_max_tree,
        }

    def _tokenize(self, request: Tokenize) -> TokenizeReply:
        """The ids that a `generate` of the same prompt would use."""
        if request.prompt is not None and not request.add_special_tokens:
            ids = self._tokenizer.encode(request.prompt, request.special_tokens, add_special_tokens=False)
            self._refuse_long(len(ids), "prompt")
        else:
            ids = self.prompt_ids(request)
        if request.count_only:
            return TokenizeReply(id=request.id, token_ids=[], count=len(ids))
        most = MAX_ANSWER_BYTES // _ID_BYTES
        if len(ids) > most:
            field = _prompt_field(request)
            raise RequestError(
                "too_long", f"{field}: {len(ids)} ids; an answer holds {most}: send count_only, or parts", field
            )
        return TokenizeReply(id=request.id, token_ids=ids, count=len(ids))

    def _detokenize(self, request: Detokenize) -> DetokenizeReply:
        ids = request.token_ids
        text = self._text_of(ids, []) if request.skip_special_tokens else self._tokenizer.decode(ids, False)
        size = len(text.encode())
        if size > MAX_ANSWER_BYTES:
            reason = f"token_ids: their text has {size} bytes; an answer holds {MAX_ANSWER_BYTES}: send them in parts"
            raise RequestError("too_long", reason, "token_ids")
        return DetokenizeReply(id=request.id, text=text)

    def _check_prompt(self, request: Prompted) -> None:
        names = ("prompt", "messages", "token_ids") if isinstance(request, Generate) else ("prompt", "messages")
        given = [name for name in names if getattr(request, name) is not None]
        if not given and isinstance(request, Generate) and request.session is not None:
            _check_no_chat(request)
            return  # it goes on from what the session holds
        if not given:
            _refuse("prompt", f"is missing; send one of {', '.join(names)}")
        if len(given) > 1:
            _refuse(given[1], f"and {given[0]} are both set; send exactly one")
        if not getattr(request, given[0]):
            _refuse(given[0], "is empty")
        if isinstance(request, Generate):
            self._refuse_long(len(request.token_ids or ()), "token_ids")
        self._refuse_hopeless(request.prompt or "", "prompt")
        self._refuse_many(len(request.messages or ()))
        if request.messages is None:
            _check_no_chat(request)
        else:
            self._check_chat(request, request.messages)

    def _check_chat(self, request: Prompted, messages: Sequence[Message]) -> None:
        tokenizer = self._tokenizer
        if not tokenizer.has_chat_template:
            _refuse("messages", "cannot be rendered: this engine has no chat template; send a prompt")
        if tokenizer.template_error is not None:
            _refuse("messages", f"cannot be rendered: {tokenizer.template_error}; send a prompt")
        for place, message in enumerate(messages):
            _check_message(f"[{place}]", message)
        reserved = _RESERVED_VARIABLES | tokenizer.variables
        for name in request.chat_template_kwargs or ():
            if name in reserved:
                _refuse("chat_template_kwargs", f"cannot set {name!r}, which the chat template gets from elsewhere")
        if request.continue_final_message and request.add_generation_prompt:
            _refuse("continue_final_message", "and add_generation_prompt exclude each other; send one of them")

    def _check_ids(self, request: Generate) -> None:
        for field, ids in (
            ("token_ids", request.token_ids or ()),
            ("stop_ids", request.stop_ids),
            ("logit_bias", request.logit_bias),
        ):
            self._check_vocabulary(field, ids)

    def _check_vocabulary(self, field: str, ids: Collection[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.limits.vocabulary):
            wrong = next(token for token in ids if not 0 <= token < self.limits.vocabulary)
            _refuse(field, f"id {wrong} is outside the vocabulary of {self.limits.vocabulary}")

    def _check_stops(self, request: Generate) -> None:
        if len(request.stop) > MAX_STOPS:
            _refuse("stop", f"has {len(request.stop)} texts; at most {MAX_STOPS}")
        for text in request.stop:
            size = len(text.encode())
            if size == 0:
                _refuse("stop", "holds an empty text")
            if size > MAX_STOP_BYTES:
                _refuse("stop", f"holds a text of {size} bytes; at most {MAX_STOP_BYTES}")
        count = len(self._stop_ids(request))
        if count > MAX_STOP_IDS:
            _refuse("stop_ids", f"and the engine's own end-of-text ids are {count}; at most {MAX_STOP_IDS}")

    def _check_bias(self, request: Generate) -> None:
        bias = request.logit_bias
        if len(bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"has {len(bias)} entries; at most {MAX_LOGIT_BIAS}")
        for token, value in bias.items():
            if value != -math.inf and not abs(value) <= MAX_BIAS:
                _refuse("logit_bias", f"of id {token} must be from -{MAX_BIAS:g} to {MAX_BIAS:g} or -inf, not {value}")
        if len(bias) >= self.limits.vocabulary and all(value == -math.inf for value in bias.values()):
            _refuse("logit_bias", "bans every token")

    def _check_penalties(self, request: Generate) -> None:
        """Comparisons are written so that NaN fails them."""
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(request, field)
            if not abs(value) <= MAX_PENALTY:
                _refuse(field, f"must be from -{MAX_PENALTY:g} to {MAX_PENALTY:g}, 0 being off, not {value}")
        repetition = request.repetition_penalty
        if not MIN_REPETITION_PENALTY <= repetition <= MAX_REPETITION_PENALTY:
            least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
            _refuse("repetition_penalty", f"must be from {least:g} to {most:g}, 1 being off, not {repetition}")
        if self.limits.penalties:
            return
        for field, off in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("repetition_penalty", 1.0)):
            if getattr(request, field) != off:
                _refuse(field, f"is not applied by this engine's executor; leave it out (or send {off:g})")

    def _check_speculation(self, request: Generate) -> None:
        drafter, limits = request.speculate, self.limits
        if drafter is not None and drafter not in limits.drafters:
            offered = ", ".join(limits.drafters)
            if drafter in DRAFTERS:
                _refuse("speculate", f"{drafter!r} is not in this engine's bundle; it offers {offered}")
            nearest = difflib.get_close_matches(drafter[:40], limits.drafters, n=1)
            hint = f"did you mean {nearest[0]!r}? This engine offers" if nearest else "this engine offers"
            _refuse("speculate", f"{drafter[:40]!r} is no drafter; {hint} {offered}")
        if request.max_tree is not None and not 1 <= request.max_tree <= limits.max_tree:
            _refuse("max_tree", f"must be from 1 (no draft) to {limits.max_tree} tokens, not {request.max_tree}")

    def _check_form(self, request: Generate) -> None:
        """The fields that say what the answer must look like."""
        given = [*(["choices"] if request.choices is not None else []), *forms_of(request)]
        if len(given) > 1:
            _refuse(given[1], f"and {given[0]} are both set; send at most one of {', '.join(('choices', *FORMS))}")
        if given and given[0] in FORMS and not self.limits.grammars:
            reason = "cannot be kept to: this daemon takes no grammars (limits.grammars of info); leave it out"
            _refuse(given[0], reason)
        if request.choices is not None:
            self._check_choices(request, request.choices)

    def _check_choices(self, request: Generate, choices: Sequence[str]) -> None:
        if not self.limits.choices:
            _refuse("choices", "cannot be scored: this engine's executor does not (limits.choices of info)")
        if not 1 <= len(choices) <= MAX_CHOICES:
            _refuse("choices", f"must be 1 to {MAX_CHOICES} texts, not {len(choices)}")
        first: dict[str, int] = {}
        for place, text in enumerate(choices):
            if not text:
                _refuse_choice(place, "is empty; leave it out, or say what it stands for")
            if text in first:
                _refuse_choice(place, f"is {text[:40]!r} once more, as choices[{first[text]}]; send it once")
            first[text] = place
            if (least := self._tokenizer.least_tokens(text)) > MAX_CHOICE_TOKENS:
                _refuse_choice(place, f"has at least {least} tokens; at most {MAX_CHOICE_TOKENS}: shorten it")
        for field, off in _NOT_WITH_CHOICES.items():
            if getattr(request, field) != off:
                _refuse(field, "cannot be combined with choices; leave it out")

    def _stop_ids(self, request: Generate) -> list[int]:
        """The request's stop ids, and the engine's unless ignored; each once."""
        return list(dict.fromkeys([*request.stop_ids, *([] if request.ignore_eos else self._eos)]))

    def _decode(self, ids: Sequence[int], prompt: Sequence[int]) -> str:
        """The text of ids behind a prompt, without a vocabulary of the core."""
        return self._tokenizer.decode([*prompt, *ids])[len(self._tokenizer.decode(prompt)) :]

    def _refuse_long(self, count: int, field: str, held: int = 0) -> None:
        room = self.limits.context - 1 - held
        if count > room:
            behind = f" behind the {held} that the session holds" if held else ""
            raise RequestError(
                "too_long",
                f"{field}: {count} tokens are {count - room} too many; the context of {self.limits.context} "
                f"leaves room for {max(0, room)}{behind} and a completion of at least one",
                field,
            )

    def _refuse_many(self, messages: int) -> None:
        """Refuses a chat of more messages than the context can hold, before a template is run over them."""
        room = self.limits.context // _TOKENS_PER_MESSAGE
        if messages > room:
            raise RequestError(
                "too_long",
                f"messages: {messages} are {messages - room} too many; each takes at least {_TOKENS_PER_MESSAGE} "
                f"tokens, so the context of {self.limits.context} leaves room for {room}",
                "messages",
            )

    def _refuse_hopeless(self, text: str, field: str) -> None:
        """Refuses a text that is certainly too long, before seconds are spent on tokenizing it."""
        least = self._tokenizer.least_tokens(text)
        room = self.limits.context - 1
        if least > room:
            raise RequestError(
                "too_long",
                f"{field}: {len(text.encode())} bytes are at least {least} tokens, at least {least - room} too many; "
                f"the context of {self.limits.context} leaves room for {room} and a completion of at least one",
                field,
            )


def _check_message(place: str, message: Message) -> None:
    """The parts of a message that no template is asked about."""
    if not _ROLE.fullmatch(message.role):
        _refuse(
            "messages", f"{place}.role must be a name of 1 to 64 letters, digits and .-_, not {message.role[:40]!r}"
        )
    if message.content is None and message.role != "assistant":
        _refuse("messages", f"{place}.content is missing; only an assistant's turn may be without")
    if not isinstance(message.content, list):
        return
    for index, part in enumerate(message.content):
        kind = part.get("type")
        if kind != "text":
            _refuse(
                "messages", f"{place}.content[{index}] is of type {str(kind)[:40]!r}; this engine reads text parts only"
            )
        if not isinstance(part.get("text"), str):
            _refuse("messages", f"{place}.content[{index}].text is missing or no text")


def _check_no_chat(request: Prompted) -> None:
    for field in _CHAT_FIELDS:
        if getattr(request, field):
            _refuse(field, "is for chats; send it with messages, or leave it out")


def _check_schedule(request: Generate) -> None:
    """The fields that say when."""
    for field in ("timeout_ms", "deadline_ms"):
        value = getattr(request, field)
        if value is not None and not 1 <= value <= MAX_TIMEOUT_MS:
            _refuse(field, f"must be from 1 to {MAX_TIMEOUT_MS} milliseconds, not {value}")
    if request.priority not in PRIORITIES:
        nearest = difflib.get_close_matches(request.priority[:40], PRIORITIES, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        _refuse("priority", f"{request.priority[:40]!r} is none of {', '.join(PRIORITIES)}{hint}")
    if request.hold and request.logprobs is not None:
        _refuse("hold", "cannot be combined with logprobs; leave one of them out")


def _check_sampling(request: Generate) -> None:
    """The sampling fields; comparisons are written so that NaN fails them."""
    temperature = request.temperature
    if not (temperature == 0.0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
        _refuse(
            "temperature", f"must be 0 (greedy) or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, not {temperature}"
        )
    if request.top_k < 0:
        _refuse("top_k", f"must be 0 (off) or positive, not {request.top_k}")
    if not 0.0 < request.top_p <= 1.0:
        _refuse("top_p", f"must be above 0 and at most 1 (off), not {request.top_p}")
    if not 0.0 <= request.min_p <= 1.0:
        _refuse("min_p", f"must be from 0 (off) to 1, not {request.min_p}")


def _begins_answer(request: Prompted) -> bool | None:
    """Whether a chat's prompt ends with the beginning of an answer. Where none is to come, more of the chat may."""
    if request.add_generation_prompt is None and isinstance(request, Generate) and request.max_tokens == 0:
        return False
    return request.add_generation_prompt


def _prompt_field(request: Prompted) -> str:
    if isinstance(request, Generate) and request.token_ids is not None:
        return "token_ids"
    if request.messages is not None:
        return "messages"
    in_session = isinstance(request, Generate) and request.session is not None
    return "session" if in_session and request.prompt is None else "prompt"


def _refuse_choice(place: int, reason: str) -> NoReturn:
    raise RequestError("bad_request", f"choices[{place}] {reason}", "choices")


def _refuse(field: str, reason: str) -> NoReturn:
    raise RequestError("bad_request", f"{field} {reason}", field)
