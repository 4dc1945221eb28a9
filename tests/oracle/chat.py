"""The shared byte-level BPE tokenizer of the oracle's checkpoints, and what transformers renders with chat templates.

The templates are written for this test in the style of well-known ones. `chat.json` is a list of
    { name, source: directory of the tokenizer (relative to the repository), files: {name: text} that replace some of
      it, conversations: [{messages, text, ids} or {messages, error}], prompts: [{text, ids}] (plain text as a
      completion prompt, with what the tokenizer itself puts in front) }.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import jinja2
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from .cases import ROOT, TOKENIZER, assemble_tokenizer

SPECIAL = [
    "<|begin|>",
    "<|end|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "[INST]",
    "[/INST]",
]
ADDED_TEXT = "<think>"  # an added token that is not special: it is text
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ a", "o n", "r e", "s t", "e r", "s er", "u ser", "Ã ©", "i s", "Ċ Ċ"]

CHATML = """\
{% for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

HEADERS = """\
{% set loop_messages = messages %}
{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + \
'<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{ content }}
{% endfor %}
  {% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
  {% endif %}
"""

INSTRUCT = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}{{ bos_token }}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{% if loop.last and system is defined %}"
    "{{ '[INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

# What newer templates lean on: namespaces, reversed lists, loop controls, string methods, tojson, undefined tools.
REASONING = """\
{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last_query = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last_query %}{{- '<think>\\n' }}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{{- {'last': ns.last_query, 'quoted': messages[0].content} | tojson }}
{%- if add_generation_prompt %}
    {{- '\\n<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "the first question"}],
    [
        {"role": "system", "content": 'Answer in French, with <b>tags</b> & "quotes".'},
        {"role": "user", "content": "  Où est le café? 猫 🐈‍⬛\n"},
    ],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello, user!"},
        {"role": "user", "content": "def f(x):\n    return x < 3 and '<|im_end|>'\n"},
    ],
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "yes  "},
        {"role": "user", "content": "{{ x }}"},
    ],
    [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}],
]

PROMPTS = ["the user is in", "café 猫 🐈‍⬛\n\n  end", "a<|im_end|>b <think> [INST]c", " ", "x"]


def write_tokenizer(directory: Path, expected_ids: list[int]) -> None:
    """Writes tokenizer.json and tokenizer_config.json; the first special tokens must have `expected_ids`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + SPECIAL + [ADDED_TEXT]
    words += [merge.replace(" ", "") for merge in MERGES]
    vocabulary = {word: index for index, word in enumerate(words)}
    merges = [(merge.split()[0], merge.split()[1]) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(ADDED_TEXT, special=False, normalized=False)])
    begin = SPECIAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    if [tokenizer.token_to_id(word) for word in SPECIAL[: len(expected_ids)]] != expected_ids:
        raise RuntimeError("the special tokens have moved: cases.py names their ids")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(dumps(tokenizer_config() | {"chat_template": CHATML}))


def tokenizer_config(bos: Any = "<|begin|>", eos: Any = "<|end|>") -> dict[str, Any]:
    """A tokenizer_config.json without its chat template."""
    return {
        "bos_token": bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": 256,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def variants() -> list[tuple[str, dict[str, str]]]:
    """(name, tokenizer files that replace the shared ones) of every way in which a checkpoint states its template."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    classic_token = {"__type": "AddedToken", "content": "<|begin|>", **flags}
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ 'tools' }}"}]
    not_this = "{{ 'not this one' }}"
    configs: dict[str, dict[str, Any]] = {
        "chatml": tokenizer_config(eos="<|im_end|>") | {"chat_template": CHATML},
        "headers": tokenizer_config(classic_token) | {"chat_template": HEADERS},
        "instruct": tokenizer_config() | {"chat_template": INSTRUCT},
        "named": tokenizer_config() | {"chat_template": named},
        # transformers leaves BOS to tokenizer.json wherever there is one, whatever this key says.
        "no-begin": tokenizer_config() | {"chat_template": HEADERS, "add_bos_token": False},
        "reasoning-file": tokenizer_config() | {"chat_template": not_this},
    }
    entries = [(name, {"tokenizer_config.json": dumps(config)}) for name, config in configs.items()]
    # As transformers 5 saves it: in a file of its own, which wins over the key.
    entries[-1][1]["chat_template.jinja"] = REASONING
    return entries


def write_chat(path: Path) -> None:
    """Writes chat.json: what transformers makes of every template and conversation."""
    shared = str(TOKENIZER.relative_to(ROOT))
    sources = [(name, shared, files) for name, files in variants()] + [("tiny", "engines/tiny", {})]
    entries: list[dict[str, Any]] = [
        {"name": name, "source": source, "files": files} for name, source, files in sources
    ]
    with tempfile.TemporaryDirectory() as temporary:
        for entry in entries:
            directory = assemble_tokenizer(entry, Path(temporary) / entry["name"])
            entry |= transformers_view(directory)
    path.write_text(dumps(entries))


def transformers_view(directory: Path) -> dict[str, Any]:
    """The `conversations` and `prompts` of one entry of chat.json."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    conversations: list[dict[str, Any]] = []
    for messages in CONVERSATIONS:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            conversations.append({"messages": messages, "error": str(error)})
            continue
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        conversations.append({"messages": messages, "text": text, "ids": ids})
    prompts = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in PROMPTS]
    return {"conversations": conversations, "prompts": prompts}


def dumps(value: Any) -> str:
    """JSON as the fixtures store it."""
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
