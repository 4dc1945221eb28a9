"""`ull inspect`: what is inside an engine bundle and what drafting costs, or the same of a daemon's engine.

What verifying and drafting cost is a matter of the machine, so a bundle does not say it: it is measured here by
loading the engine, as a daemon does at its warm-up, or it is what a running daemon has measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from ull import _native
from ull.bounded_child import MEMORY_LIMIT
from ull.bundle import (
    HEAD_SCAN,
    MANIFEST_FILE,
    Bundle,
    Manifest,
    Model,
    Speculation,
    open_bundle,
    read_manifest,
    verify_hashes,
)
from ull.client import Client
from ull.commands.inspect_tables import (
    MIB,
    parameter_count,
    print_costs,
    print_served,
    print_tables,
    print_verification,
)
from ull.daemon.admission import MAX_PROMPT_TOP_LOGPROBS
from ull.daemon.config import PAGE_TOKENS, EngineConfig, GrammarsConfig
from ull.daemon.host import auto_threads
from ull.errors import BundleError, ConfigError
from ull.text.tokenizer import Tokenizer
from ull.wire import longest_request

_MEMORY = ("weight_bytes", "kv_bytes", "drafter_weight_bytes", "drafter_kv_bytes")
_RUNTIME_BYTES = 160 * MIB  # Python, libraries, buffers; about 70 MB are measured
_SLOT_BYTES = 22 << 10  # of a place in the queue, beside its tokens
_SCORE_BYTES = 4 + 8 * MAX_PROMPT_TOP_LOGPROBS  # of a prompt's token, and of the likeliest in its place
_TEMPLATE_PROCESS = 48 * MIB + MEMORY_LIMIT  # Python and jinja2, and what a chat may take there
_GRAMMAR_PROCESS = 96 * MIB  # Python, the core and the vocabulary, beside what a grammar may take there
_UNFINISHED_MESSAGES = 8  # of all clients together (native/io/server.cpp)
_MESSAGES_IN_HAND = 4  # the io thread's, two between it and the control plane, and that one's
_UNREAD_BYTES = 32 * MIB  # of all clients together (native/io/outbox.h), and what keeping them takes
_UNSENT_BYTES = 256 * MIB  # of a frame to each of 1024 clients that have taken a part of it (native/io/server.cpp)
_DRAFTER_GROUPS = {
    "medusa": "medusa heads",
    "draft": "draft model",
    "eagle": "eagle head",
    "dflash": "dflash head",
}
_GROUPS = {"qkv": "attention", "o": "attention", "gate_up": "mlp", "down": "mlp"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull inspect`."""
    parser.add_argument("bundle", metavar="X.ull|URL", help="a bundle, or a running daemon's address (ipc://, tcp://)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--verify", action="store_true", help="compare every file with its SHA-256")
    parser.add_argument(
        "--measure", action="store_true", help="load the engine and measure here what verifying and drafting cost"
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="computing threads of --measure (default: as ulld takes)"
    )


def run(options: argparse.Namespace) -> int:
    """Runs `ull inspect`; exit status 1 when the bundle cannot be opened, differs from its hashes or does not load."""
    if options.threads < 0:
        raise ConfigError(f"--threads must be positive, not {options.threads}", "threads")
    if "://" not in options.bundle:
        return main(Path(options.bundle), options.json, options.verify, options.measure, options.threads)
    for name in ("verify", "measure"):
        if getattr(options, name):
            raise ConfigError(f"--{name} takes a bundle; {options.bundle} is a daemon's address", name)
    with Client(options.bundle) as client:
        info = client.info()
    if options.json:
        print(json.dumps({"engine": info.engine, "executor": info.executor}, indent=2, ensure_ascii=False))
    else:
        print_served(options.bundle, info.engine, info.executor)
    return 0


def main(path: str | Path, as_json: bool = False, verify: bool = False, measure: bool = False, threads: int = 0) -> int:
    """Prints what the bundle at `path` holds; `verify` reads every file and compares its SHA-256, the manifest's first.

    `measure` loads the engine, with `threads` computing threads (0: as many as a daemon takes), and measures what
    verifying and drafting cost. Returns 0, or 1 when the bundle cannot be opened, a file differs or the engine cannot
    be loaded (said on stderr, or in the JSON's `error`).
    """
    path = Path(path)
    hashes: dict[str, str | None] = {}
    report: dict[str, Any] = {"path": str(path)}
    try:
        if verify:
            hashes = {MANIFEST_FILE: None, **verify_hashes(path, read_manifest(path))}
        bundle = open_bundle(path)
        report |= describe(bundle)
        error = None
        if measure:
            report["measured"] = measure_costs(bundle, threads or auto_threads())
    except BundleError as problem:
        error = problem.message
    damaged = [f"{name} {problem}" for name, problem in hashes.items() if problem is not None]
    if damaged:  # says more than the first complaint of open_bundle
        error = f"{path}: " + "; ".join(damaged) + "; rebuild it with ull-build"
    if verify:
        report["verified"] = {name: problem or "ok" for name, problem in hashes.items()}
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({**report, "error": error}), indent=2).decode())
    else:
        if "model" in report:
            print_tables(report)
        if verify:
            print_verification(hashes)
        if "measured" in report:
            print_costs(report["measured"])
        if error is not None:
            print(f"ull inspect: error: {error}", file=sys.stderr)
    return 0 if error is None else 1


def describe(bundle: Bundle) -> dict[str, Any]:
    """The manifest as plain data, with `path`, `digest`, the number of parameters, and `weight_bytes` per group."""
    sizes: dict[str, int] = {}
    for name, entry in bundle.tensors.items():
        group = _group(name)
        sizes[group] = sizes.get(group, 0) + entry.nbytes
    return {
        "path": str(bundle.path),
        "digest": bundle.digest,
        "parameters": parameter_count(bundle.manifest.model),
        "weight_bytes": {**sizes, "total": bundle.weight_bytes},
        "memory_bytes": memory_bytes(bundle),
        **{name: msgspec.to_builtins(getattr(bundle.manifest, name)) for name in Manifest.__struct_fields__},
    }


def memory_bytes(bundle: Bundle) -> dict[str, int]:
    """What a daemon with the default configuration takes of a machine's memory, at most; `total` is its MemoryMax.

    Of an engine for a GPU the weights and pages are the device's; here they are what loading goes through.
    """
    manifest = bundle.manifest
    speculation = manifest.speculation or Speculation()
    drafters = [item.model for item in (speculation.draft, speculation.eagle, speculation.dflash) if item is not None]
    context, defaults = manifest.model.context, EngineConfig()
    message = longest_request(context, Tokenizer(bundle.tokenizer_directory).bytes_per_token)
    slots = defaults.queue_depth + 16
    parts = {
        "weights": bundle.weight_bytes,
        "kv": sum(_kv_bytes(model, context) for model in (manifest.model, *drafters)),
        "runtime": _RUNTIME_BYTES + slots * (_SLOT_BYTES + 4 * context),
        "prompt_logprobs": slots * _SCORE_BYTES * context,
        "chats": _TEMPLATE_PROCESS,
        "grammars": _GRAMMAR_PROCESS + 3 * GrammarsConfig().memory_bytes,  # there, kept here, and requests'
        "messages": (_UNFINISHED_MESSAGES + _MESSAGES_IN_HAND + defaults.queue_depth) * message
        + _UNREAD_BYTES
        + _UNSENT_BYTES,
    }
    total = sum(parts.values()) * 11 // 10
    return {**parts, "total": -(-total // MIB) * MIB}


def _kv_bytes(model: Model, context: int) -> int:
    """Of the keys and values of one full context, in 16 bits, in whole pages and one more."""
    tokens = (-(-context // PAGE_TOKENS) + 1) * PAGE_TOKENS
    return 2 * 2 * model.layers * model.kv_heads * model.head_dim * tokens


def measure_costs(bundle: Bundle, threads: int) -> dict[str, Any]:
    """Loads the engine of `bundle` and measures: `verify_ns` by tree size, `draft_ns` by drafter, memory in bytes.

    Raises BundleError when it cannot be loaded.
    """
    if bundle.manifest.target != "cpu":
        raise BundleError(f"{bundle.path} runs on a GPU: serve it with ulld and ask that, `ull inspect URL`")
    try:
        executor = _native.CpuExecutor(bundle.native_spec(), threads=threads, cores=[])
        engine = _native.Engine(executor, str(bundle.vocabulary_path))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise BundleError(f"{bundle.path} cannot be loaded: {error}") from error
    info = engine.info
    return {"threads": threads, **{name: info[name] for name in ("executor", *_MEMORY, "verify_ns", "draft_ns")}}


def _group(name: str) -> str:
    parts = name.split(".")
    if parts[0] in _DRAFTER_GROUPS:
        return _DRAFTER_GROUPS[parts[0]]
    if parts[0] == "layers":
        return _GROUPS.get(parts[2], "norms")  # biases and scales count with their matrix
    return {"embed": "embedding", "lm_head": "lm_head", HEAD_SCAN: "lm_head's FP8 copy"}.get(parts[0], "norms")
