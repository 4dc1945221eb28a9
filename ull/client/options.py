"""What a caller may ask of a completion: type and meaning of every option, once for both clients and the command line.

None stands for an option's default. The fields are those of `ull.wire.Generate` and `ull.wire.Tokenize`, but for the
prompt's own, for `session`, and for `timeout` and `deadline`, which are in seconds. What a value may be, the daemon
checks (`ull.daemon.admission`).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, cast, get_args, get_type_hints

from ull.wire import DRAFTERS, MAX_TREE, PRIORITIES

_Function = TypeVar("_Function", bound=Callable[..., Any])


class PromptOptions(TypedDict, total=False):
    """How a prompt becomes token ids."""

    tools: Annotated[Sequence[Mapping[str, Any]] | None, "function schemas for the chat template; with messages"]
    documents: Annotated[Sequence[Mapping[str, Any]] | None, "documents for the chat template; with messages"]
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None, 'variables of the chat template, such as {"enable_thinking": False}; with messages'
    ]
    add_generation_prompt: Annotated[bool | None, "False leaves out the beginning of an answer; with messages"]
    continue_final_message: Annotated[bool | None, "the completion continues the last message; with messages"]
    special_tokens: Annotated[
        bool | None, "texts of control tokens, such as <|im_end|>, become these tokens (default: they stay text)"
    ]


class TimeOptions(TypedDict, total=False):
    """When a request's turn comes, and when it is too late for it."""

    priority: Annotated[str | None, f"{', '.join(PRIORITIES)}: who goes first (default: interactive)"]
    deadline: Annotated[
        float | None, "seconds within which the last token must come: refused at once where it cannot, else ended then"
    ]
    timeout: Annotated[float | None, "seconds after which the daemon ends the request"]


class SamplingOptions(TypedDict, total=False):
    """Which tokens come, when they end, and what drafts them."""

    tool_choice: Annotated[
        str | Mapping[str, Any] | None,
        'auto (default), none, required, or {"type": "function", "function": {"name": ...}}; with tools',
    ]
    max_tokens: Annotated[int | None, "most tokens to generate (default: the daemon's)"]
    temperature: Annotated[float | None, "0: greedy (default)"]
    top_k: Annotated[int | None, "0: off (default)"]
    top_p: Annotated[float | None, "1: off (default)"]
    min_p: Annotated[float | None, "0: off (default)"]
    presence_penalty: Annotated[float | None, "off the logits of the completion's tokens, -2 to 2; 0: off (default)"]
    frequency_penalty: Annotated[
        float | None, "off a logit, times the completion's count of its token, -2 to 2; 0: off (default)"
    ]
    repetition_penalty: Annotated[float | None, "above 0, prompt included; 1: off (default)"]
    seed: Annotated[int | None, "default: drawn by the daemon, and reported"]
    stop: Annotated[str | Sequence[str] | None, "a text that ends the completion, no part of it"]
    stop_ids: Annotated[Sequence[int] | None, "token ids that end the completion"]
    logit_bias: Annotated[Mapping[int, float] | None, "token id -> number added to its logit"]
    logprobs: Annotated[int | None, "log-probabilities and this many alternatives; 0: only the chosen token's"]
    prompt_logprobs: Annotated[bool | None, "result.prompt_logprobs has how likely each token of the prompt is"]
    prompt_top_logprobs: Annotated[int | None, "and result.prompt_top_logprobs this many of the likeliest in its place"]
    choices: Annotated[
        Sequence[str] | None,
        "the answer is one of these texts; result.choice has the probability of each. At most one of choices, "
        "json_schema, regex, lark, json_object",
    ]
    json_schema: Annotated[
        Mapping[str, Any] | bool | str | type | None,
        "the answer is JSON of this JSON Schema: a mapping, its JSON text, or a msgspec.Struct class",
    ]
    regex: Annotated[str | None, "the answer matches this regular expression as a whole"]
    lark: Annotated[str | None, "the answer is a text of this grammar, in Lark's syntax"]
    json_object: Annotated[bool | None, "the answer is a JSON object"]
    ignore_eos: Annotated[bool | None, "do not stop at the engine's end-of-text ids"]
    hold: Annotated[bool | None, "compute the answer and keep it until commit(); not with logprobs"]
    speculate: Annotated[str | None, f"{', '.join(DRAFTERS)} (default: the daemon's); the tokens are the same for all"]
    max_tree: Annotated[int | None, f"most tokens of one verification, 1 to {MAX_TREE} (default: as many as pay)"]


class GenerateOptions(SamplingOptions, TimeOptions, PromptOptions, total=False):
    """The options of `Client.generate` and `Session.generate`."""


class ReadOptions(TimeOptions, PromptOptions, total=False):
    """The options of `Client.prewarm` and `Session.append`, which read a prompt and generate nothing."""


class TokenizeOptions(PromptOptions, total=False):
    """The options of `Client.tokenize`."""

    add_special_tokens: Annotated[bool | None, "False leaves out what the tokenizer puts around a text, such as BOS"]


GENERATE_OPTIONS = GenerateOptions.__optional_keys__
READ_OPTIONS = ReadOptions.__optional_keys__
TOKENIZE_OPTIONS = TokenizeOptions.__optional_keys__


def prompt_options(options: Mapping[str, Any]) -> PromptOptions:
    """Those of a request's options that its prompt's ids depend on. With tool_choice "none" no tools are in it."""
    chosen = {name: options[name] for name in options if name in PromptOptions.__optional_keys__}
    if options.get("tool_choice") == "none":
        chosen.pop("tools", None)
    return cast("PromptOptions", chosen)


class Option(NamedTuple):
    """What is said of one option."""

    type: Any  # None included, which stands for the default
    meaning: str


def options_of(group: type) -> dict[str, Option]:
    """The options of one of the groups above, by name, in the order in which they are shown."""
    return {name: Option(*get_args(hint)[:2]) for name, hint in get_type_hints(group, include_extras=True).items()}


def names_options(group: type) -> Callable[[_Function], _Function]:
    """Lets signature and docstring of a function of `**options` name each of `group`, for `help` and for editors."""

    def name(function: _Function) -> _Function:
        options = options_of(group)
        signature = inspect.signature(function)
        given = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option.type)
            for name, option in options.items()
        ]
        vars(function)["__signature__"] = signature.replace(parameters=[*given, *named])
        if function.__doc__ is not None:
            lines = [f"{name}: {option.meaning}" for name, option in options.items()]
            function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), "", *lines])
        return function

    return name


def refuse_unknown(function: str, options: Mapping[str, object], known: frozenset[str]) -> None:
    """Raises TypeError, worded as Python's own, for the first of `options` that `function` does not have."""
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f". Did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")
