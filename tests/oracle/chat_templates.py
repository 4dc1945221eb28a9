"""What transformers renders with public chat templates: `python -m tests.oracle.chat_templates` writes expected.json.

    { name of the template: { name of the chat: {"text", "ids": digest} or {"error": true} } }

Where a template writes today's date, the text holds {now:FORMAT}; such a chat has no ids.
"""

import datetime
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATES = Path(__file__).parents[1] / "data/chat_templates"
EXPECTED = TEMPLATES / "expected.json"
NAMES = sorted(str(path.relative_to(TEMPLATES)) for path in TEMPLATES.glob("*/*.jinja"))
CONFIG = {
    "bos_token": "<|begin|>",
    "eos_token": "<|end|>",
    "pad_token": "<|pad|>",
    "unk_token": "<|unk|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
SPECIAL = [
    *(CONFIG[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token")),
    "<|im_start|>",
    "<|im_end|>",
]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]"]
SPECIAL += ["[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|channel|>", "<|message|>"]
TEXT_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<｜User｜>", "<｜Assistant｜>", "\n\n"]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a place, "now" & here <b>.',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "a town: Málaga, 猫"},
                "unit": {"type": "string", "enum": ["C", "F"], "description": "the scale"},
            },
            "required": ["place"],
        },
    },
}
CALL: dict[str, Any] = {"id": "call12345", "type": "function", "function": {"name": "weather"}}
USER = {"role": "user", "content": "  What is the weather in Málaga?\n"}


def _called(arguments: Any) -> list[dict[str, Any]]:
    call = {**CALL, "function": {**CALL["function"], "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": '{"degrees": 21}'},
    ]


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "turns": {
        "messages": [
            {"role": "system", "content": 'Answer in French, with <b>tags</b> & "quotes".'},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello, user!"},
            {"role": "user", "content": "def f(x):\n    return x < 3 and {{ x }}\n"},
        ]
    },
    "tools": {"messages": [{"role": "system", "content": "Be brief."}, USER], "tools": [WEATHER]},
    "called": {"messages": _called({"place": "Málaga", "unit": "C"}), "tools": [WEATHER]},
    "called-text": {"messages": _called('{"place": "Málaga"}'), "tools": [WEATHER]},
    "documents": {"messages": [USER], "documents": [{"title": "Málaga", "text": "It is sunny."}]},
    "no-thinking": {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two", "reasoning_content": "one and one"},
            {"role": "user", "content": "three"},
        ],
        "variables": {"enable_thinking": False},
    },
    "no-prompt": {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "in parts"}]}]},
    "continued": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is "}],
        "continue_final_message": True,
    },
}


def write_tokenizer(directory: Path, template: str) -> None:
    """A byte-level tokenizer with control tokens of many families, and `template`."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL, *TEXT_TOKENS]
    tokenizer = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in TEXT_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def digest(ids: list[int]) -> str:
    """A short digest of token ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def date_formats(template: str) -> list[str]:
    """The formats in which a template writes the date of today."""
    return re.findall(r"""strftime_now\(["']([^"']+)["']\)""", template)


def dated(text: str, formats: list[str], now: datetime.datetime) -> str:
    """`text` with the date in place of {now:FORMAT}."""
    for form in formats:
        text = text.replace(f"{{now:{form}}}", now.strftime(form))
    return text


def transformers_view(template: str, directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What transformers makes of every chat with `template`."""
    import transformers

    write_tokenizer(directory, template)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    formats = date_formats(template)
    for name, chat in CHATS.items():
        variables = {"add_generation_prompt": not chat.get("continue_final_message"), **chat}
        variables |= variables.pop("variables", {})
        messages = variables.pop("messages")
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except Exception:
            yield name, {"error": True}
            continue
        if name == "parts" and ("in parts" not in text or "'text'" in text or '"text"' in text):
            continue  # the template drops the list, or writes it as it is; ull gives it the text
        found = [form for form in formats if datetime.datetime.now().strftime(form) in text]
        for form in found:
            text = text.replace(datetime.datetime.now().strftime(form), f"{{now:{form}}}")
        entry = {"text": text}
        if not found:
            ids = tokenizer.apply_chat_template(messages, return_dict=False, **variables)
            entry["ids"] = digest(ids)
        yield name, entry


def main() -> None:
    """Writes expected.json."""
    expected = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as directory:
            template = (TEMPLATES / name).read_text(encoding="utf-8")
            expected[name] = dict(transformers_view(template, Path(directory)))
    EXPECTED.write_text(json.dumps(expected, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
