"""Holds TensorRT plans against our kernels and the CPU executor, on the GPU that has just built them.

TensorRT may choose an FP8 kernel that is numerically unstable, and it chooses anew for every number of tokens: what the
plans compute is therefore looked at, not assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ull.bundle import Bundle, Forward, PlanCheck, Plans
from ull_build.local_gpu import open_program
from ull_build.tensorrt.plans import PlansFailed

Logits = NDArray[np.float32]  # [tokens, V]

CHECK_TOKENS = 160  # two whole chunks and a part of one
EXACT_TOKENS = 64  # of them, by rounds of every size
MOVED_TOKENS = 17  # that a prompt's chunks are moved by, to see whether a token's place within one matters


@dataclass(frozen=True)
class Seen:
    """What the plans computed: logits by rounds of 64 tokens and, of the first few, by rounds of one.

    `exact`: the sizes whose logits were bit for bit those of one token; `place_exact`: a token's place within a chunk
    does not matter. Both are claimed only where there were tokens enough to see it.
    """

    logits: Logits
    plain: Logits
    exact: list[int]
    place_exact: bool
    resident_bytes: int  # device memory that TensorRT took for them


def enough_of(tokens: Sequence[int], context: int) -> list[int]:
    """The tokens that plans are tried on: as many as the context holds and CHECK_TOKENS asks for, in repetitions."""
    wanted = min(context, CHECK_TOKENS)
    return [tokens[place % len(tokens)] for place in range(wanted)]


def read_logits(bundle: Bundle, tokens: Sequence[int]) -> Logits:
    """Logits of a bundle's forward on this machine's GPU. Raises GpuError or BundleError."""
    program = _open(bundle)
    try:
        return np.array(program.replay().logits(tokens))
    finally:
        program.close()


def observe_plans(bundle: Bundle, tokens: Sequence[int]) -> Seen:
    """Runs the plans of a bundle in every way that the daemon will.

    Raises GpuError or BundleError where they do not run, PlansFailed where they do not repeat themselves.
    """
    plans = bundle.manifest.forward.plans
    assert plans is not None
    program = _open(with_forward(bundle, Forward("tensorrt", "tensorrt", everything(plans))))
    try:
        replay = program.replay()
        logits = replay.logits(tokens)
        moved = [replay.logits(tokens[:MOVED_TOKENS])]
        if len(tokens) > MOVED_TOKENS:
            moved.append(replay.logits(tokens[MOVED_TOKENS:], MOVED_TOKENS))
        few = tokens[:EXACT_TOKENS]
        plain = replay.logits(few, size=1)
        exact = [size for size in plans.token_counts if np.array_equal(replay.logits(few, size=size), plain)]
        resident = program.resident_bytes
    finally:
        program.close()
    if 1 not in exact:
        raise PlansFailed("the TensorRT plans give the same tokens other logits each time", field="forward")
    if len(few) < EXACT_TOKENS:
        exact = [1]
    place_exact = len(tokens) >= EXACT_TOKENS + MOVED_TOKENS and np.array_equal(np.concatenate(moved), logits)
    return Seen(logits, plain, exact, place_exact, resident)


@dataclass(frozen=True)
class References:
    """What plans are held against. `plain` and `fp8`: the CPU executor's logits without and with FP8 activations.

    `fused`: our kernels', None where they do not run. Of made-up weights there are only these.
    """

    plain: Logits | None
    fp8: Logits | None
    fused: Logits | None


def check_plans(seen: Seen, against: References, limit: float) -> PlanCheck:
    """The account of a comparison of both, rounds of 64 tokens and of one. Raises PlansFailed above the limit."""
    few = len(seen.plain)

    def off(reference: Logits | None) -> float | None:
        if reference is None:
            return None
        return max(_error(seen.logits, reference), _error(seen.plain, reference[:few]))

    def agreement(reference: Logits | None) -> float | None:
        return None if reference is None else _agreement(seen.logits, reference)

    fp8, fused, plain = against.fp8, against.fused, against.plain
    made = PlanCheck(
        tokens=len(seen.logits),
        cpu_error=off(fp8),
        cpu_top1=agreement(fp8),
        fused_error=off(fused),
        fused_top1=agreement(fused),
        activation_error=None if fp8 is None or plain is None else _error(fp8, plain),
        limit=limit,
    )
    beyond = (made.fused_error or 0.0) - (made.activation_error or 0.0)
    if not max(made.cpu_error or 0.0, beyond) <= limit:
        found = []
        if made.cpu_error is not None:
            found.append(f"{made.cpu_error:.1%} off the cpu executor's with the same FP8 activations")
        if made.fused_error is not None:
            found.append(f"{made.fused_error:.1%} off our kernels'")
        raise PlansFailed(
            f"the TensorRT plans' logits are {', '.join(found)}; the limit is {limit:.0%}. "
            "TensorRT has probably chosen an unstable FP8 kernel",
            field="forward",
        )
    return made


def with_forward(bundle: Bundle, forward: Forward) -> Bundle:
    """The same bundle with its phases computed by others."""
    return dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, forward=forward))


def everything(plans: Plans) -> Plans:
    """The plans with a graph for every token count that they have a profile for."""
    return msgspec.structs.replace(plans, exact=plans.token_counts)


def with_findings(plans: Plans, seen: Seen, made: PlanCheck | None) -> Plans:
    """The manifest's account with what has been seen. A native KV cache knows no trees."""
    return msgspec.structs.replace(
        plans,
        exact=[1] if plans.attention == "native" else seen.exact,
        place_exact=seen.place_exact,
        resident_bytes=seen.resident_bytes,
        check=made,
    )


def _open(bundle: Bundle) -> Any:
    """The graph program of a bundle for as many tokens as are checked."""
    return open_program(bundle, min(bundle.manifest.model.context, CHECK_TOKENS))


def _error(logits: Logits, reference: Logits) -> float:
    if not (np.isfinite(logits).all() and np.isfinite(reference).all()):
        return 1e9  # a manifest holds no infinity
    return float(np.linalg.norm(logits - reference) / np.linalg.norm(reference))


def _agreement(logits: Logits, reference: Logits) -> float:
    return float(np.mean(logits.argmax(axis=1) == reference.argmax(axis=1)))
