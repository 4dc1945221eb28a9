"""One token's draw by the 16-bit head and the sampler, and by the FP8 scan and the rescoring, on the same inputs."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import emulation
import linear_layers
from emulation import aligned, pointer
from linear_layers import pack_rows, pack_weights
from ull.gpu import params as layout
from ull.gpu.geometry import head_scan, linear, sampling
from ull_build.weights.head_scan import scan_bounds
from ull_build.weights.quantise import quantise_rows, scale_rows

EPSILON = 1e-5
SOURCES = ("head.cu", "head_scan.cu", "head_rescore.cu", "sample.cu", "filter.cu")
Rescale = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@functools.cache
def kernels(vocabulary: int, hidden: int, reports: bool = False) -> emulation.Kernels:
    return emulation.build(
        SOURCES, {"VOCABULARY": vocabulary, "HIDDEN": hidden, "RMS_EPSILON": EPSILON}, reports=reports
    )


def structure(kind: type[Any]) -> tuple[Any, NDArray[np.uint8]]:
    """A struct of 0xFF bytes, and its memory."""
    memory = aligned(ctypes.sizeof(kind), np.uint8)
    return kind.from_buffer(memory), memory


@dataclass
class Draw:
    """`logits`: of the head, or of the scan; `exact`: those that were computed again, by token."""

    token: int
    logits: NDArray[np.float32]
    exact: dict[int, np.float32]


class Head:
    """An lm_head [V, H] in both forms, and one token's residual; `rescale` spoils the bounds."""

    def __init__(
        self, rows: NDArray[np.float32], residual: NDArray[np.float32], rescale: Rescale | None = None
    ) -> None:
        self.vocabulary, self.hidden = rows.shape
        halves, scales = scale_rows(rows)
        codes, code_scales = quantise_rows(halves.astype(np.float32) * scales[:, None])
        bounds = scan_bounds(halves, scales, codes, code_scales)
        self.halves, self.scales, self.bounds = halves, scales, bounds
        self._weights, self._scale = pack_weights(halves), pack_rows(scales)
        self._codes, self._code_scale = pack_weights(codes), pack_rows(code_scales)
        self._bound = pack_rows(rescale(bounds) if rescale else bounds)
        self._residual = aligned((1, linear_layers.round_up(self.hidden, 16)), np.float32, 0)
        self._residual[:, : self.hidden] = residual
        self._norm_weight = aligned(self.hidden, np.float32, 1)

    @property
    def normed(self) -> NDArray[np.float16]:
        """What the head multiplies with."""
        return linear_layers.normed(self._residual[:, : self.hidden], self._norm_weight, EPSILON)[0]

    def draw(
        self,
        sampling_: dict[str, Any],
        scans: bool,
        position: int = 7,
        blocks: int = 5,
        seed: int = 0,
        reports: bool = False,
    ) -> Draw:
        """The token drawn for `position`. `reports`: a race ends the launch."""
        built = kernels(self.vocabulary, self.hidden, reports)
        round_, round_memory = structure(layout.Round)
        round_.count, round_.base, round_.draws, round_.first_draw = 1, position - 1, 1, 0
        round_.depths[0], round_.sequence, round_.mode, round_.max_tokens = 0, 1, layout.TAKE, 1
        state, state_memory = structure(layout.State)
        state.stop_count = 0
        wish = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "top_logprobs": -1}
        wish |= {"bias_count": 0, "penalises": 0}
        for name, value in (wish | sampling_).items():
            setattr(state.sampling, name, value)
        logits = aligned((1, linear_layers.round_up(self.vocabulary, 16)), np.float32)
        scratch = aligned(sampling.SCRATCH_BYTES, np.uint8)
        results, results_memory = structure(layout.RoundResult * layout.ROUND_SLOTS)
        run = functools.partial(self._run, built, seed, [self._residual, round_memory, state_memory])
        codes = (self._codes, self._code_scale) if scans else (self._weights, self._scale)
        head = layout.LinearParams(
            round=pointer(round_memory),
            weights=pointer(codes[0]),
            scale=pointer(codes[1]),
            residual=pointer(self._residual),
            norm_weight=pointer(self._norm_weight),
            output=pointer(logits),
        )
        exact: dict[int, np.float32] = {}
        if scans:
            normed = linear_layers.activation_buffer(self.hidden)
            params = layout.HeadScanParams(
                round=pointer(round_memory),
                state=pointer(state_memory),
                weights=pointer(self._weights),
                scale=pointer(self._scale),
                bound=pointer(self._bound),
                residual=pointer(self._residual),
                norm_weight=pointer(self._norm_weight),
                logits=pointer(logits),
                normed=pointer(normed),
                scratch=pointer(scratch),
                accept=layout.AcceptParams(pointer(round_memory), pointer(state_memory), pointer(results_memory)),
            )
            run("ull_head_scan_1", head_scan.scan(self.vocabulary, blocks), head, [])
            run("ull_head_bounds", head_scan.bounds(self.vocabulary, blocks), params, [logits])
            rescore = head_scan.rescore(self.hidden, self.vocabulary, blocks)
            run("ull_head_rescore", rescore, params, [logits, scratch, normed])
            exact = _exact(scratch, head_scan.LIST_AT)
            answer = results[1]
            failed = round_.drawn[0].token < 0
            assert (answer.sequence, answer.status) == (1, layout.NOT_FINITE if failed else layout.OK)
            assert failed or (answer.count, answer.tokens[0].token) == (1, round_.drawn[0].token)
        else:
            counts = aligned(linear_layers.round_up(self.vocabulary, 16), np.uint32, 0)
            params_ = layout.SampleParams(*map(pointer, (round_memory, state_memory, logits, scratch, counts)))
            run("ull_head_1", linear.head(self.vocabulary, 1, blocks), head, [])
            for kernel in sampling.SAMPLING:
                geometry = sampling.sample(kernel, self.vocabulary, 1, blocks)
                run(kernel, geometry, params_, [logits, scratch])
        drawn = round_.drawn[0]
        assert (drawn.node, drawn.logprob, drawn.top_count) == (0, 0.0, 0)
        return Draw(drawn.token, logits[0, : self.vocabulary].copy(), exact)

    def _run(
        self,
        built: emulation.Kernels,
        seed: int,
        written: list[NDArray[Any]],
        name: str,
        geometry: linear.Geometry,
        params: ctypes.Structure,
        also: list[NDArray[Any]],
    ) -> None:
        grid, threads, shared = geometry
        weights = (self._weights, self._scale, self._codes, self._code_scale, self._bound, self._norm_weight)
        built.run(
            name,
            grid=grid,
            threads=threads,
            shared_bytes=shared,
            params=params,
            seed=seed,
            predecessor_writes=[*written, *also],
            constants=weights,
        )


def _exact(scratch: NDArray[np.uint8], at: int) -> dict[int, np.float32]:
    """The list that ull_head_rescore leaves in its scratch memory."""
    count = int(scratch[4:8].view(np.uint32)[0])
    entries = scratch[at : at + 8 * count]
    tokens, logits = entries.view(np.int32)[::2], entries.view(np.float32)[1::2]
    assert len(set(tokens.tolist())) == count, "a row is scored once"
    return dict(zip(tokens.tolist(), logits, strict=True))
