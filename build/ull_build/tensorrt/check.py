"""Holds TensorRT plans against our kernels and the CPU executor, on the GPU that has just built them.

TensorRT may choose an FP8 kernel that is numerically unstable, and it chooses anew for every number of tokens: what the
plans compute is therefore looked at, not assumed.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ull.bundle import Bundle, Forward, PlanCheck, Plans
from ull.errors import BuildError
from ull.log import Log

Logits = NDArray[np.float32]  # [tokens, V]

CHECK_TOKENS = 160  # two whole chunks and a part of one
EXACT_TOKENS = 64  # of them, by rounds of every size
MOVED_TOKENS = 17  # that a prompt's chunks are moved by, to see whether a token's place within one matters
LOGITS_LIMIT = 0.1  # |difference| / |logits|: rounding elsewhere costs a tenth of that, an unstable kernel all of it


@dataclass(frozen=True)
class Seen:
    """What the plans computed: logits by rounds of 64 tokens, and what else was bit for bit the same."""

    logits: Logits
    exact: list[int]
    place_exact: bool


def read_logits(bundle: Bundle, tokens: Sequence[int]) -> Logits:
    """Logits of a bundle's forward on this machine's GPU. Raises GpuError or BundleError."""
    program = _open(bundle)
    try:
        return np.array(program.replay().logits(tokens))
    finally:
        program.close()


def observe_plans(bundle: Bundle, tokens: Sequence[int]) -> Seen:
    """Runs the plans of a bundle in every way that the daemon will. Raises GpuError or BundleError."""
    plans = bundle.manifest.forward.plans
    assert plans is not None
    program = _open(with_forward(bundle, Forward("tensorrt", "tensorrt", everything(plans))))
    try:
        replay = program.replay()
        logits = replay.logits(tokens)
        moved = replay.logits(tokens[:MOVED_TOKENS]), replay.logits(tokens[MOVED_TOKENS:], MOVED_TOKENS)
        few = tokens[:EXACT_TOKENS]
        plain = replay.logits(few, size=1)
        exact = [size for size in plans.token_counts if np.array_equal(replay.logits(few, size=size), plain)]
    finally:
        program.close()
    return Seen(logits, exact, np.array_equal(np.concatenate(moved), logits))


@dataclass(frozen=True)
class References:
    """What plans are held against. `plain` and `fp8`: the CPU executor's logits without and with FP8 activations."""

    plain: Logits
    fp8: Logits
    fused: Logits | None  # our kernels'; None where they do not run


def check_plans(seen: Seen, against: References, limit: float = LOGITS_LIMIT) -> PlanCheck:
    """The account of a comparison. Raises BuildError above the limit."""
    fused = against.fused
    made = PlanCheck(
        tokens=len(against.fp8),
        cpu_error=_error(seen.logits, against.fp8),
        cpu_top1=_agreement(seen.logits, against.fp8),
        fused_error=None if fused is None else _error(seen.logits, fused),
        fused_top1=None if fused is None else _agreement(seen.logits, fused),
        activation_error=_error(against.fp8, against.plain),
        limit=limit,
    )
    if not max(made.cpu_error, (made.fused_error or 0.0) - made.activation_error) <= limit:
        ours = "" if made.fused_error is None else f", {made.fused_error:.1%} off our kernels'"
        raise BuildError(
            f"the TensorRT plans' logits are {made.cpu_error:.1%} off the cpu executor's with the same FP8 activations"
            f"{ours}; the limit is {limit:.0%}. TensorRT has probably chosen an unstable FP8 kernel: delete the timing "
            'cache beside the bundle and build again, use precision = "bf16", or --forward fused',
            field="forward",
        )
    return made


def with_forward(bundle: Bundle, forward: Forward) -> Bundle:
    """The same bundle with its phases computed by others."""
    return dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, forward=forward))


def everything(plans: Plans) -> Plans:
    """The plans with a graph for every token count that they have a profile for."""
    return msgspec.structs.replace(plans, exact=plans.token_counts)


def settled(plans: Plans, seen: Seen, made: PlanCheck | None) -> Plans:
    """The manifest's account with what has been seen. A native KV cache knows no trees."""
    exact = [1] if plans.attention == "native" else seen.exact
    return msgspec.structs.replace(plans, exact=exact, place_exact=seen.place_exact, check=made)


def _open(bundle: Bundle) -> Any:
    """The graph program of a bundle for as many tokens as are checked."""
    program = importlib.import_module("ull.gpu.program")  # needs cuda-python, which other builds do without
    load: Callable[..., Any] = program.load
    context = min(bundle.manifest.model.context, CHECK_TOKENS)
    return load(bundle, context=context, log=Log("warning"))


def _error(logits: Logits, reference: Logits) -> float:
    if not np.isfinite(logits).all():
        return 1e9  # a manifest holds no infinity
    return float(np.linalg.norm(logits - reference) / np.linalg.norm(reference))


def _agreement(logits: Logits, reference: Logits) -> float:
    return float(np.mean(logits.argmax(axis=1) == reference.argmax(axis=1)))
