"""Bundles whose chat template writes calls of tools, in each of the forms that are known."""

import json
from pathlib import Path

from checkpoints import write_checkpoint
from oracle.chat_templates import TEMPLATES
from ull_build.build import build
from ull_build.settings import Settings

# Tokens of the families, behind those of the small tokenizer; some have no text in a stream.
CONTROL = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "[INST]", "[/INST]")
TEXTS = ("<tool_call>", "</tool_call>")
FIRST = 320
NAMED = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}{{ m.content }}{% else %}"
    "{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
# A form's template, and what ends a turn in it.
FORMS = {
    "hermes": ("trl/qwen3_instruct_2507.jinja", "<|im_end|>"),
    "llama": ("trl/llama3_1.jinja", "<|eot_id|>"),
    "mistral": ("axolotl/mistral_v3_tekken.jinja", "<|eos|>"),
    "mistral_named": (NAMED, "<|eos|>"),
}


def template_of(form: str) -> str:
    """The source of a form's template."""
    template = FORMS[form][0]
    return template if form == "mistral_named" else (TEMPLATES / template).read_text(encoding="utf-8")


def build_families(directory: Path) -> Path:
    """A bundle of a random model with the tokens of all families; `with_template` gives it a form."""
    model = write_checkpoint(directory / "model", config={"max_position_embeddings": 4096})
    path = model / "tokenizer.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    for place, text in enumerate(CONTROL + TEXTS):
        entry = {"id": FIRST + place, "content": text, "special": text in CONTROL, "normalized": False}
        description["added_tokens"].append({**entry, "single_word": False, "lstrip": False, "rstrip": False})
    path.write_text(json.dumps(description), encoding="utf-8")
    return build(Settings(model=model, output=directory / "x.ull", name="x", evaluate=False)).path
