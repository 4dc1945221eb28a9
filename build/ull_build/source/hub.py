"""A model of the Hugging Face Hub in place of a directory: "ORG/NAME", or "ORG/NAME@REVISION".

Only what a build reads is fetched, into the Hub's own cache, by a child process: an interrupted build can end it at
once, while the library's threads would read on to the end of their files. What was fetched is kept, and the next try
goes on from there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ull.bundle import FromHub
from ull.errors import CheckpointError
from ull.spawn import python_command, python_environment
from ull_build.progress import Reporter

SCHEME = "hf://"  # before an id that stands for a model of the Hub and for no directory

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"({_WORD}/{_WORD})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,200}}))?")
_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".json", ".toml")  # ends of names of files, not of models
_NO_DIRECTORY = "there is no such directory"

_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
# What quantisers leave beside config.json is fetched too: it says how the weights are to be read.
_MODEL = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "*.safetensors", *_TOKENIZER),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
)
# What a build reads of each kind of source, and what it reads in its stead where the repository has none of it.
_WANTED: Mapping[FromHub, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "model": (_MODEL, ()),
    "draft": (_MODEL, ()),
    "lora": (("adapter_config.json", "adapter_model.safetensors"), ()),
    "eagle": (("config.json", "model.safetensors.index.json", "*.safetensors"), ("pytorch_model.bin",)),
    "dflash": (("config.json", "model.safetensors.index.json", "*.safetensors"), ("pytorch_model.bin",)),
    "medusa": (("config.json", "medusa_lm_head.safetensors", "model.safetensors"), ("medusa_lm_head.pt",)),
}
# Copies of the weights in other forms: of subfolders, and in Mistral's own.
_IGNORED = ("*/*.safetensors", "consolidated*.safetensors")


@dataclass(frozen=True)
class HubId:
    """A model's id; a revision of None is the main branch."""

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


@dataclass(frozen=True)
class Snapshot:
    """What was fetched: where it lies, and "ORG/NAME@COMMIT"."""

    directory: Path
    name: str


def named_source(text: str, base: Path) -> str:
    """What a recipe's `text` stands for, which is relative to `base`: a path, or SCHEME and an id of the Hub.

    A path that exists wins. Only two words with one slash between them can be an id: "./x/y", "/x/y" and "x/y/z" never
    are.
    """
    if text.startswith(SCHEME):
        return text
    path = base / text
    found = _ID.fullmatch(text)
    if found is None or found[1].endswith(_FILES) or path.exists():
        return str(path)
    return SCHEME + text


def hub_id(text: str) -> HubId | None:
    """The id behind SCHEME; None for a path. Raises CheckpointError for what can be no id."""
    if not text.startswith(SCHEME):
        return None
    found = _ID.fullmatch(text.removeprefix(SCHEME))
    if found is None:
        raise CheckpointError(f"{text} is no id of the Hugging Face Hub; write hf://ORG/NAME", field="model")
    return HubId(found[1], found[2])


def fetch(kind: FromHub, wanted: HubId, reporter: Reporter) -> Snapshot:
    """Fetches what a build reads of `wanted`, or finds it in the cache. Raises CheckpointError saying what helps."""
    first, instead = _WANTED[kind]
    answer = _ask(
        {
            "repository": wanted.repository,
            "revision": wanted.revision,
            "first": first,
            "instead": instead,
            "ignored": _IGNORED,
            "whole_model": kind in ("model", "draft"),
        },
        reporter,
    )
    if (failure := answer.get("failure")) is not None:
        raise CheckpointError(_say(kind, wanted, failure, answer.get("text", "")), field=kind)
    directory = Path(answer["directory"])
    snapshot = Snapshot(directory, f"{wanted.repository}@{directory.name}")
    if (why := answer.get("cached")) is not None:
        reporter.note(f"{snapshot.name}: from the cache, since {why}")
    else:
        reporter.note(f"{snapshot.name}: in {directory}")
    return snapshot


def _ask(request: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """What the child answers. It ends with this process, or when this is interrupted."""
    environment = python_environment()
    if not reporter.has_bars:
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        environment.setdefault("HF_HUB_VERBOSITY", "error")
    command = [*python_command("ull_build.source.hub_child"), json.dumps(request)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            assert child.stdout is not None
            text = child.stdout.read()
            status = child.wait()
        except BaseException:
            child.kill()
            raise
    try:
        answer = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if not isinstance(answer, dict):
        raise CheckpointError(f"the download ended without an answer (exit status {status})", field="model")
    return answer


def _say(kind: FromHub, wanted: HubId, failure: str, text: str) -> str:
    """The line for a failure of the child."""
    folder = wanted.repository.rpartition("/")[2]
    option = {"medusa": "--medusa", "lora": "--lora"}.get(kind, f"--{kind}")
    at = "" if wanted.revision is None else f" --revision {wanted.revision}"
    elsewhere = (
        f"run `hf download {wanted.repository}{at} --local-dir {folder}` on a machine that reaches it, and give "
        f"{option} the folder {folder}"
    )
    why = f" ({text})" if text else ""
    if failure == "useless":
        return text
    if failure == "package":
        return f"{_NO_DIRECTORY} as {wanted}, and a model of the Hub needs a package: pip install huggingface_hub"
    nowhere = f"{wanted} is neither a directory nor in the Hub's cache"
    if failure == "offline":
        return f"{nowhere}, and HF_HUB_OFFLINE is set; unset it, or {elsewhere}"
    if failure == "unreachable":
        return f"{nowhere}, and the Hub cannot be reached{why}; {elsewhere}"
    if failure == "gated":
        page = f"{_endpoint()}/{wanted.repository}"
        return f"{wanted} is gated: ask for access at {page}, then `hf auth login` (or set HF_TOKEN) and build again"
    if failure == "unknown":
        hint = "check the spelling; a private one needs `hf auth login` (or HF_TOKEN)"
        return f"{_NO_DIRECTORY} as {wanted}, and the Hub knows no model of that name; {hint}"
    if failure == "revision":
        return f"{wanted.repository} has no revision {wanted.revision!r}; give a branch, tag or commit of it"
    if failure == "refused":
        return f"the Hub refused {wanted}{why}; try again later, or {elsewhere}"
    return f"{wanted} could not be downloaded{why}; build again to go on from there, or {elsewhere}"


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
