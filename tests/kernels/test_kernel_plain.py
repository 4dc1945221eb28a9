"""Rounds of one token that filter nothing: the head's maxima, and the kernel that draws and ends the round.

Against the kernels of any request, bit for bit.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import emulation
from emulation import KernelError, aligned, pointer
from linear_rig import MODELS, Layer
from logit_rows import KINDS, rows_of
from round_rig import SINGLE, Device, emitted
from ull import _native
from ull.gpu import params as layout
from ull.gpu.geometry import sampling as launches

SMALL, LARGE = 1003, 70001  # neither is a multiple of anything
SOURCES = ("begin.cu", "accept.cu", "plain.cu", "sample.cu", "filter.cu")
MULTIPROCESSORS = 132


@functools.cache
def kernels_of(vocabulary: int, reports: bool = False) -> emulation.Kernels:
    return emulation.build(SOURCES, {"VOCABULARY": vocabulary}, reports=reports)


# ---- the head's maxima ---------------------------------------------------------------------------------------------


def ordered(values: NDArray[np.float32]) -> NDArray[np.uint64]:
    """As scores.cuh: orders as floats do, and the zeros are one."""
    bits = np.where(values == 0, np.float32(0), values).view(np.uint32)
    return np.where(bits >> 31 != 0, ~bits, bits | 0x80000000).astype(np.uint64)


def parts_of(row: NDArray[np.float32], blocks: list[tuple[int, int]]) -> NDArray[np.uint64]:
    """What the head's blocks say of their logits [first, last): [best, maximum and poison]."""
    parts = np.zeros((len(blocks), 2), np.uint64)
    for part, (first, last) in zip(parts, blocks, strict=True):
        values = row[first:last]
        if not len(values):
            continue
        packed = ordered(values) << np.uint64(32) | (~np.arange(first, last, dtype=np.uint32)).astype(np.uint64)
        part[0] = packed.max()
        finite = ordered(values[np.isfinite(values)])
        part[1] = finite.max(initial=0) if np.isfinite(values).all() else np.uint64(1) << np.uint64(32)
    return parts


def head_blocks(vocabulary: int, blocks: int) -> list[tuple[int, int]]:
    """The rows of each block of the head."""
    tiles = -(-vocabulary // 16)
    edges = [min(16 * (block * tiles // blocks), vocabulary) for block in range(blocks + 1)]
    return list(itertools.pairwise(edges))


class Head(Layer):
    """The lm_head of one token, with its maxima."""

    def __init__(self, model: str, seed: int = 3, reports: bool = False) -> None:
        super().__init__("head", model, seed, with_bias=False, reports=reports)
        self.maxima = aligned((launches._MOST_BLOCKS, 2), np.uint64)

    def launch(
        self,
        kernel: str,
        geometry: Any,
        params: layout.LinearParams,
        seed: int,
        begun: NDArray[Any],
        written: list[NDArray[Any]],
    ) -> None:
        params.maxima = pointer(self.maxima)
        super().launch(kernel, geometry, params, seed, begun, written)


@pytest.mark.parametrize("model", MODELS)
def test_the_head_finds_each_block_s_maxima(model: str) -> None:
    head = Head(model)
    for multiprocessors in (1, 2, 3, 5, 64):
        head.maxima[...] = 7
        row = head.run(1, 1, multiprocessors)[0][: head.rows]
        (blocks, _), _, _ = head.geometry(1, multiprocessors)
        np.testing.assert_array_equal(head.maxima[:blocks], parts_of(row, head_blocks(head.rows, blocks)))
        assert (head.maxima[blocks:] == 7).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_head_says_where_a_logit_is_not_finite(value: float) -> None:
    head = Head("odd")
    scale = head.packed[1]
    assert scale is not None
    scale.reshape(-1)[200] = value
    row = head.run(1, 1, 5)[0][: head.rows]
    assert np.isfinite(row).sum() == head.rows - 1
    poisoned = head.maxima[:5, 1] >> np.uint64(32)
    assert poisoned.tolist() == [int(first <= 200 < last) for first, last in head_blocks(head.rows, 5)]


def test_a_head_that_nobody_asks_for_maxima_writes_the_same_logits() -> None:
    expected = Layer("head", "odd", 3, with_bias=False).run(1, 1, 5)
    np.testing.assert_array_equal(Head("odd").run(1, 1, 5).view(np.uint32), expected.view(np.uint32))


def test_the_head_s_maxima_are_found_in_order() -> None:
    head = Head("odd", reports=True)
    for seed in range(2):
        row = head.run(1, 1, 3, seed)[0][: head.rows]
        np.testing.assert_array_equal(head.maxima[:3], parts_of(row, head_blocks(head.rows, 3)))


# ---- the draw ------------------------------------------------------------------------------------------------------


class Single(Device):
    """Rounds of one token on given logits, by the plain sampler or by the full one."""

    def __init__(
        self, vocabulary: int, plain: bool, kernels: emulation.Kernels | None = None, blocks: int = MULTIPROCESSORS
    ) -> None:
        super().__init__(kernels or kernels_of(vocabulary))
        self.vocabulary, self.plain, self.slices = vocabulary, plain, 0
        self.blocks = min(blocks, -(-vocabulary // 16))
        self.row = aligned(-(-vocabulary // 16) * 16, np.float32)
        self.scratch = aligned(launches.SCRATCH_BYTES, np.uint8)
        self.count = aligned(1, np.uint32, 0)
        self.text_counts = aligned(self.row.size, np.uint32, 0)
        self.device_memory.append(self.row)

    def draw_from(self, logits: NDArray[np.float32]) -> Any:
        """What the round under way draws; -> the result."""
        self.row[: self.vocabulary] = logits
        sample = layout.SampleParams(
            *map(ctypes.addressof, (self.round, self.state)),
            *map(pointer, (self.row, self.scratch, self.text_counts)),
        )
        if not self.plain:
            for kernel in launches.SAMPLING:
                self._run(kernel, launches.sample(kernel, self.vocabulary, 1, MULTIPROCESSORS), sample)
            return self.accept()
        parts = parts_of(logits, head_blocks(self.vocabulary, self.blocks))
        at = launches.MAXIMA_AT
        self.scratch[at : at + parts.nbytes] = parts.reshape(-1).view(np.uint8)
        addresses = map(ctypes.addressof, (self.round, self.state, self.results))
        accept = layout.AcceptParams(*addresses, pointer(self.text))
        params = layout.PlainParams(sample, accept, pointer(self.count), self.blocks)
        self.count[0] = 0  # begin's work
        slot = self.round.sequence % layout.ROUND_SLOTS
        ctypes.memset(ctypes.addressof(self.results[slot]), 0xFF, ctypes.sizeof(layout.RoundResult))
        (slices, nodes), threads, shared = launches.plain(self.vocabulary, MULTIPROCESSORS)
        self._run(launches.PLAIN, ((self.slices or slices, nodes), threads, shared), params)
        result = self.results[slot]
        assert (result.sequence, result.begin_ns) == (self.round.sequence, self.round.begin_ns)
        return result

    def seen(self, result: Any) -> tuple[Any, ...]:
        """All that a round leaves behind."""
        state, round_ = self.state, self.round
        drawn = round_.drawn[0]
        emits = result.count > 0
        return (
            *(result.status, result.count, result.stopped),
            [(token.token, token.logprob, token.top_count, token.node) for token in result.tokens[: result.count]],
            (state.token, state.position, state.node) if emits else None,
            (state.stopped, state.sequence, list(round_.accepted[: round_.accepted_count])),
            (drawn.token, drawn.logprob, drawn.top_count, drawn.node) if round_.count and round_.draws else None,
        )


def wish(temperature: float = 0.0, seed: int = 0, min_p: float = 0.0) -> dict[str, Any]:
    sampling = layout.Sampling(temperature=temperature, top_p=1.0, min_p=min_p, seed=seed, top_logprobs=-1)
    return {"sampling": sampling, "setting": 1}


def both(
    vocabulary: int, row: NDArray[np.float32], slices: int = 0, blocks: int = MULTIPROCESSORS, **sampling: Any
) -> int:
    """The token that both samplers draw at position 41, or -1; and they leave the same behind."""
    found = []
    for plain in (False, True):
        device = Single(vocabulary, plain, blocks=blocks)
        device.slices, device.seed = slices, sampling.get("seed", 0)
        device.ask(layout.TAKE, [5], SINGLE, position=40, **wish(**sampling))
        found.append(device.seen(device.draw_from(row)))
    assert found[0] == found[1]
    return int(found[1][-1][0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
def test_the_plain_sampler_draws_what_the_full_one_does(vocabulary: int, kind: str) -> None:
    row = rows_of(np.random.default_rng(KINDS.index(kind)), kind, 1, vocabulary)[0]
    for number, temperature in enumerate((0.0, 0.2, 0.9, 3.0)):
        for seed in range(3 if vocabulary == SMALL else 1):
            sampling = {"temperature": temperature, "seed": 100 * number + seed, "min_p": 0.05 * (seed % 2)}
            token = both(vocabulary, row, **sampling)
            assert token == _native.sample(row, 41, sampling)


@pytest.mark.parametrize("slices", [1, 2, 7, 64])
@pytest.mark.parametrize("blocks", [1, 5, 63])
def test_no_grid_changes_the_draw(slices: int, blocks: int) -> None:
    row = rows_of(np.random.default_rng(slices), "ties", 1, SMALL)[0]
    for temperature in (0.0, 0.8):
        token = both(SMALL, row, temperature=temperature, seed=9, slices=slices, blocks=blocks)
        assert token == _native.sample(row, 41, {"temperature": temperature, "seed": 9})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_logit_that_is_not_finite_ends_the_request(value: float, temperature: float) -> None:
    row = rows_of(np.random.default_rng(1), "normal", 1, SMALL)[0]
    row[707] = value
    assert both(SMALL, row, temperature=temperature) == -1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_generation(temperature: float) -> None:
    """Rounds that continue one another, a stop, what is skipped behind it, a prefill, and a round anew."""
    rng = np.random.default_rng(4)
    table = rng.normal(0, 2, (SMALL, SMALL)).astype(np.float32)
    tokens, position = [17], 30
    for step in range(12):
        tokens.append(_native.sample(table[tokens[-1]], position + step + 1, {"temperature": temperature, "seed": 3}))
    stop = next(token for token in tokens[6:] if token not in tokens[1:6])
    found: list[list[Any]] = []
    for plain in (False, True):
        device, emits, left = Single(SMALL, plain), list[int](), list[Any]()
        fields = {**wish(temperature, 3), "stops": [stop]}

        def end(device: Single = device, emits: list[int] = emits, left: list[Any] = left) -> None:
            result = device.draw_from(table[device.round.tokens[0] if device.round.count else 0])
            emits += emitted(result)
            left.append(device.seen(result))

        device.ask(layout.TAKE, [17], SINGLE, position=position, **fields)
        end()
        for _ in range(9):
            device.ask(layout.CONTINUE, **fields)
            end()
        assert emits == tokens[1 : tokens.index(stop, 1) + 1]
        assert left[-1][0] == layout.SKIPPED
        device.ask(layout.PREFILL, [4], position=70, **fields)
        end()
        assert left[-1][:2] == (layout.OK, 0)
        device.ask(layout.TAKE, [tokens[-1]], SINGLE, position=71, **fields)
        end()
        assert left[-1][1] == 1
        device.control.cancelled_through = device.sequence + 1
        device.ask(layout.CONTINUE, **fields)
        end()
        assert left[-1][0] == layout.SKIPPED
        found.append(left)
    assert found[0] == found[1]


# ---- order ---------------------------------------------------------------------------------------------------------


def round_in_order(kernels: emulation.Kernels, temperature: float, seed: int) -> None:
    """Two rounds, the second of which continues the first."""
    device = Single(SMALL, True, kernels, blocks=9)
    device.slices, device.seed = 5, seed
    rows = rows_of(np.random.default_rng(seed), "normal", 2, SMALL)
    position = 40
    for mode, row in zip((layout.TAKE, layout.CONTINUE), rows, strict=True):
        device.ask(mode, [5], SINGLE, position=40, **wish(temperature, 7))
        position += 1
        expected = _native.sample(row, position, {"temperature": temperature, "seed": 7})
        assert emitted(device.draw_from(row)) == [expected]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_all_accesses_are_ordered(temperature: float) -> None:
    for seed in range(3):
        round_in_order(kernels_of(SMALL, reports=True), temperature, seed)


FAULTS = {
    "begin reads the state before the round before has ended": (
        "begin.cu",
        "  arch::wait_for_predecessor();\n",
        "",
        "  read_state(params, shared);\n",
        "  read_state(params, shared);\n  arch::wait_for_predecessor();\n",
        r"load by thread .* before wait_for_predecessor\(\)",
    ),
    "the draw does not wait for the head": (
        *("plain.cu", "  arch::wait_for_predecessor();\n", "", "", ""),
        r"before wait_for_predecessor\(\)",
    ),
    "the last block does not fence": (
        *("sample.cuh", "    arch::fence_device();\n", "", "", ""),
        r"a race at .*load by thread .*store by thread",
    ),
    "the last block tells the host before it has reported the token": (
        "accept.cuh",
        "  report_tokens<kThreads>(round, shared, result);\n",
        "",
        "arch::store_release_system(&result->sequence, sequence);\n",
        "arch::store_release_system(&result->sequence, sequence);\n  report_tokens<kThreads>(round, shared, result);\n",
        r"store by thread .*, in memory that the host reads, has not happened before store_release_system",
    ),
}


@pytest.mark.skipif(emulation.SANITIZE or emulation.ON_DEVICE, reason="the emulator alone sees it")
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen(tmp_path: Path, fault: str) -> None:
    """Kernels with one fault each, which the order of threads need not show."""
    name, first, instead, second, instead_too, message = FAULTS[fault]
    faulty = emulation.source_of(name).read_text()
    assert first in faulty and second in faulty
    faulty = faulty.replace(first, instead).replace(second or "\0", instead_too)
    sources: list[str | Path] = ["begin.cu", "plain.cu"]
    if name.endswith(".cuh"):  # in the place of its include
        include = f'#include "{emulation.source_of(name).relative_to(emulation.KERNELS)}"\n'
        name, header = "plain.cu", faulty.replace("#pragma once\n", "")
        faulty = emulation.source_of(name).read_text()
        assert include in faulty
        faulty = faulty.replace(include, header)
    (tmp_path / name).write_text(faulty)
    sources[sources.index(name)] = tmp_path / name
    kernels = emulation.build(sources, {"VOCABULARY": SMALL}, reports=True)
    with pytest.raises(KernelError, match=message):
        round_in_order(kernels, 0.9, 1)
