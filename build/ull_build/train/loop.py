"""What both trainers share: the learning rate, rows of tokens, precision, progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ull.errors import BuildError

WARM_UP = 0.1  # of all steps


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one. Raises BuildError for a device that this machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BuildError(f"device {name!r} is not available: this PyTorch sees no GPU", field="device")
    return torch.device(name)


def autocast(device: torch.device) -> torch.autocast:
    """Matrix products in bf16 over float32 weights, where the device has instructions for them.

    A CPU without AMX multiplies bf16 more slowly than float32: 33 ms against 21 ms for [1024, 256] by [256, 4096].
    """
    fast = device.type != "cpu" or bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast)


def rate_factor(done: float) -> float:
    """Linear warm-up over the first tenth, then a cosine to zero; `done` is the fraction of the training behind it."""
    if done < WARM_UP:
        return done / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))))


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows [N, V] of -sum(target * log_softmax(logits)); `target` takes no gradient.

    `target` [N, V] are shares of a distribution over more tokens than these V, or over these alone: a row counts as
    much as it sums to. The gradient is kept from the forward pass: half the memory traffic of differentiating
    log_softmax, which is what training a small model over a large vocabulary spends its time on.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        values = logits.float()
        shares = values.softmax(-1)
        mass = target.sum(-1, keepdim=True)
        # logsumexp is the largest value less the logarithm of its share.
        total = (values.amax(-1) - shares.amax(-1).log()) * mass[:, 0] - torch.einsum("nv,nv->n", target, values)
        ctx.save_for_backward(shares.mul_(mass).sub_(target).to(logits.dtype))
        return total.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * gradient.to(difference.dtype), None


def rows_of(
    stream: NDArray[np.int32], length: int, random: np.random.Generator
) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Endless (start, tokens [length]) pieces of a stream, reshuffled and shifted in every pass."""
    length = min(length, len(stream))
    while True:
        shift = int(random.integers(0, min(length, len(stream) - length + 1)))
        starts = np.arange(shift, len(stream) - length + 1, length)
        for start in random.permutation(starts).tolist():
            yield start, stream[start : start + length]


def run_steps(
    steps: int,
    minutes: float | None,
    loss_of: Callable[[], Tensor],
    optimizers: list[torch.optim.Optimizer],
    parameters: list[Tensor],
    advance: Callable[[int], None],
    note: Callable[[str], None],
    checkpoint: Callable[[], None],
) -> float:
    """Runs `steps` optimizer steps on the losses of `loss_of`, or fewer when `minutes` are up; returns the last loss.

    The rate follows whichever of the two is further on. Says where it is about ten times and calls `checkpoint` as
    often, so that an interrupted run leaves usable weights.
    Raises BuildError when the loss is no longer finite.
    """
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    started, running, reported = time.monotonic(), math.nan, 0.0
    for step in range(steps):
        seconds = time.monotonic() - started
        done = max((step + 0.5) / steps, seconds / (minutes * 60) if minutes else 0.0)
        if done >= 1.0:
            break
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = peak * rate_factor(done)
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        if not math.isfinite(value):
            raise BuildError(f"the loss is {value} at step {step}; lower the learning rate", field="rate")
        running = value if math.isnan(running) else 0.95 * running + 0.05 * value
        advance(1)
        if done - reported >= 0.1:
            reported = done
            note(f"step {step + 1}/{steps} loss {running:.3f} ({seconds:.0f} s)")
            checkpoint()
    checkpoint()
    return running
