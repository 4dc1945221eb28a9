"""The kernels of a chunk of a prompt on the emulator: what goes in, what comes out, what a round makes of the same."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import emulation
import linear_layers
from attention_rig import Cache
from emulation import aligned, pointer
from layer_rig import numbers_of, random_tensors
from linear_layers import columns_of_step
from linear_rig import ALL_MODELS, EPSILON, Layer, copied
from ull.bundle import Forward, Model, Precision, device_macros, device_tensors
from ull.gpu.chunk import Chunks, product
from ull.gpu.fused import FusedForward
from ull.gpu.geometry import chunk
from ull.gpu.launch import Launch
from ull.gpu.memory import (
    CHUNK,
    CHUNK_ATTENTION,
    CHUNK_MLP,
    CHUNK_NORMED,
    CHUNK_PARTIAL,
    CHUNK_QKV,
    CHUNK_QUANTISED,
    CHUNK_RESIDUAL,
    CHUNK_SCALES,
    TAP_RING,
    Sizes,
    plan_memory,
    rope_table,
)
from ull.gpu.params import (
    CHUNK_PARTS,
    CHUNK_TILE,
    CHUNK_TOKENS,
    MLP_SCALE,
    OK,
    PAGE_TOKENS,
    PREFILL,
    ROUND_SLOTS,
    SLICES,
    TAKE,
    TREE_TOKENS,
    Chunk,
    ChunkAttentionParams,
    ChunkLinearParams,
    ChunkNormParams,
    ChunkQuantiseParams,
    HostControl,
    Round,
    RoundRequest,
    RoundResult,
    Sampling,
    State,
)
from ull.gpu.places import HostBlocks, Places
from ull.gpu.rounds import Rounds

NAMES = ("qkv", "o", "gate_up", "down")
TILES = CHUNK_PARTS
UNWRITTEN = 54321.0  # in rows of the residual beyond the chunk's tokens


@functools.cache
def kernels_of(model: str, reports: bool = False, fast: bool = False) -> emulation.Kernels:
    sizes, bits = ALL_MODELS[model]
    macros = {**sizes, "WEIGHT_BITS": bits, "HEAD_BITS": 24 - bits, "RMS_EPSILON": EPSILON, "FAST_PREFILL": int(fast)}
    sources = ["chunk_linear.cu", "chunk_norm.cu", "chunk_quantise.cu"]
    return emulation.build(sources, macros, reports=reports)


def chunk_of(count: int, base: int = 0, tokens: Any = ()) -> NDArray[np.uint8]:
    """A Chunk in device memory."""
    memory: Any = aligned(ctypes.sizeof(Chunk), np.uint8)
    state = Chunk.from_buffer(memory)
    state.sequence, state.base, state.count = 1, base, count
    state.tokens[: len(tokens)] = tokens
    return memory


def activation_buffer(columns: int) -> NDArray[np.float16]:
    """[tile, K / 32, quarter, 128 tokens, 8] f16, unwritten."""
    return aligned((TILES, linear_layers.round_up(columns, 32) // 32, 4, CHUNK_TILE, 8), np.float16)


def pack_in_steps(rows: NDArray[Any], result: NDArray[Any], columns: NDArray[np.int64], filler: float) -> NDArray[Any]:
    """[T, K] -> `result`, whose steps hold `columns`; tokens beyond T are `filler`."""
    steps = result.shape[1]
    full = np.full((CHUNK_TOKENS, steps * 32), filler, result.dtype)
    full[: len(rows)] = linear_layers.padded(rows, 1, 32)
    tiles = full.reshape(TILES, CHUNK_TILE, steps, 32)[..., columns]
    result[...] = tiles.transpose(0, 2, 3, 1, 4)
    return result


def unpack_from_steps(
    buffer: NDArray[Any], places: NDArray[np.int64], columns: int, is_unwritten: Callable[[Any], Any]
) -> NDArray[Any]:
    """-> [512, K], after checking that the padding of a written row, with nothing unwritten in it, is zero."""
    steps = buffer.shape[1]
    tiles = np.empty((TILES, CHUNK_TILE, steps, 32), buffer.dtype)
    tiles[..., places] = buffer.transpose(0, 3, 1, 2, 4)
    rows: NDArray[Any] = tiles.reshape(CHUNK_TOKENS, steps * 32)
    written = ~is_unwritten(rows[:, :columns])
    assert (rows[written, columns:] == 0).all()
    return rows[:, :columns]


def pack_activations(rows: NDArray[np.float16]) -> NDArray[np.float16]:
    """[T, K] -> a chunk's layout; tokens beyond T are NaN."""
    return pack_in_steps(rows, activation_buffer(rows.shape[1]), columns_of_step(), np.nan)


def unpack_activations(buffer: NDArray[np.float16], columns: int) -> NDArray[np.float16]:
    """-> [512, K], after checking that the padding of a written row is zero."""
    return unpack_from_steps(
        buffer, columns_of_step(), columns, lambda rows: np.isnan(rows.astype(np.float32)).any(axis=1)
    )


def fast_buffer(columns: int) -> NDArray[np.uint8]:
    """[tile, K / 32, half, 128 tokens, 16] e4m3, unwritten: no numbers."""
    return aligned((TILES, linear_layers.round_up(columns, 32) // 32, 2, CHUNK_TILE, 16), np.uint8, 0xFF)


def fast_columns_of_step() -> NDArray[np.int64]:
    """[half, 16]: the column of a step that stands there (chunk/layout.cuh)."""
    half, place = np.mgrid[0:2, 0:16]
    columns: NDArray[np.int64] = 8 * (place // 4) + 4 * half + place % 4
    return columns


def pack_fast(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """e4m3 [T, K] -> a chunk's layout; tokens beyond T are no numbers."""
    return pack_in_steps(codes, fast_buffer(codes.shape[1]), fast_columns_of_step(), 0xFF)


def unpack_fast(buffer: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    """-> e4m3 [512, K], after checking that the padding of a written row is zero."""
    return unpack_from_steps(buffer, fast_columns_of_step(), columns, lambda rows: (rows == 0xFF).all(axis=1))


def quantised_tokens(rows: NDArray[np.float16]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """f16 [T, K] -> e4m3 [T, K], and the scale of each token: what its largest becomes 448 by."""
    x = rows.astype(np.float32)
    peaks = np.abs(x).max(axis=1)
    scales = np.where(peaks == 0, np.float32(1), peaks / np.float32(448))
    scaled = np.clip(x * (np.float32(1) / scales)[:, None], -448, 448)
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales


def read_as_fast(rows: NDArray[np.float16]) -> NDArray[np.float64]:
    """f16 [T, K] as the fast products see them."""
    codes, scales = quantised_tokens(rows)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales[:, None]


class ChunkLayer:
    """One linear layer, and inputs for a whole chunk."""

    def __init__(
        self, name: str, model: str, seed: int, with_bias: bool, reports: bool = False, fast: bool = False
    ) -> None:
        self.name, self.kernels, self.fast = name, kernels_of(model, reports, fast), fast
        self.layer = Layer(name, model, seed, with_bias)
        generator = np.random.default_rng(seed)
        self.inputs = (generator.standard_normal((CHUNK_TOKENS, self.layer.columns)) * MLP_SCALE).astype(np.float16)
        self.residual = aligned((CHUNK_TOKENS, self.layer.residual.shape[1]), np.float32, UNWRITTEN)
        self.residual[...] = generator.standard_normal(self.residual.shape)

    @property
    def rows(self) -> int:
        return self.layer.rows // 2 if self.name == "gate_up" else self.layer.rows

    @property
    def packed_rows(self) -> int:
        """Of the weights: gate_up's have padding."""
        return 2 * linear_layers.round_up(self.rows, 8) if self.name == "gate_up" else self.rows

    def run(self, count: int, seed: int = 0, apart: bool = False, multiprocessors: int = 3) -> NDArray[Any]:
        """[512, N] after a chunk of `count` tokens; what was not written is NaN, or UNWRITTEN.

        `apart`: o or down may leave sums of slices, which the next norm adds. `multiprocessors`: which decides on how
        many rows a block has.
        """
        layer, adds, state = self.layer, self.name in ("o", "down"), chunk_of(count)
        scales = aligned(CHUNK_TOKENS, np.float32)
        if self.fast:
            codes, scales[:count] = quantised_tokens(self.inputs[:count])
        activations: NDArray[Any] = pack_fast(codes) if self.fast else pack_activations(self.inputs[:count])
        residual = copied(self.residual)
        residual[count:] = UNWRITTEN
        width = linear_layers.round_up(layer.rows, 16)
        empty = activation_buffer(self.rows) if self.name == "gate_up" else aligned((CHUNK_TOKENS, width), np.float32)
        output = residual if adds else empty
        weights, scale, bias = layer.packed
        assert weights is not None
        assert scale is not None
        params = ChunkLinearParams(
            chunk=pointer(state),
            weights=pointer(weights),
            scale=pointer(scale),
            bias=None if bias is None else pointer(bias),
            activations=pointer(activations),
            output=pointer(output),
            token_scale=pointer(scales) if self.fast else None,
        )
        partial = aligned((SLICES, CHUNK_TILE, width), np.float32)
        if apart:
            params.partial = pointer(partial)
        launch = product(f"ull_chunk_{self.name}", self.packed_rows, multiprocessors, params)
        self.kernels.run(
            launch.kernel,
            grid=launch.grid,
            threads=launch.threads,
            shared_bytes=launch.shared_bytes,
            params=params,
            seed=seed,
            predecessor_writes=[activations, residual, scales],
            constants=[part for part in layer.packed if part is not None],
            earlier=[state],
        )
        if apart:
            self._finish(count, state, output, partial, seed)
        return unpack_activations(output, self.rows) if self.name == "gate_up" else output[:, : self.rows]

    def _finish(
        self,
        count: int,
        state: NDArray[np.uint8],
        residual: NDArray[np.float32],
        partial: NDArray[np.float32],
        seed: int,
    ) -> None:
        """The norm behind o or down."""
        assert (count > CHUNK_TILE) == bool(np.isnan(partial).all())
        assert np.isnan(partial[:, count:]).all() and not np.isnan(partial[:, : count * (count <= CHUNK_TILE)]).any()
        (_, scale, bias), hidden = self.layer.packed, self.rows
        assert scale is not None
        normed = activation_buffer(hidden)
        params = ChunkNormParams(
            chunk=pointer(state),
            residual=pointer(residual),
            norm_weight=pointer(self.layer.norm_weight),
            normed=pointer(normed),
            partial=pointer(partial),
            scale=pointer(scale),
            bias=None if bias is None else pointer(bias),
            unit=1 / MLP_SCALE if self.name == "down" else 1,
        )
        grid, threads, shared_bytes = chunk.norm(hidden)
        self.kernels.run(
            "ull_chunk_norm",
            grid=grid,
            threads=threads,
            shared_bytes=shared_bytes,
            params=params,
            seed=seed,
            predecessor_writes=[residual, partial],
            constants=[self.layer.norm_weight, scale],
            earlier=[state],
        )
        expected = linear_layers.normed(residual[:count, :hidden], self.layer.norm_weight, EPSILON)
        np.testing.assert_array_equal(unpack_activations(normed, hidden)[:count], expected)

    def expected(self, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """[count, N] of fast products, and the tolerance of each element."""
        # A chip's product keeps 13 bits behind its largest term.
        off = 2.0**-11 if emulation.ON_DEVICE else linear_layers.SINGLE
        return self.layer.expected_of(read_as_fast(self.inputs[:count]), self.residual[:count], off)

    def by_rounds(self, count: int) -> NDArray[Any]:
        """[count, N]: what rounds of 64 tokens make of the same."""
        layer, parts = self.layer, []
        for first in range(0, count, TREE_TOKENS):
            held = min(TREE_TOKENS, count - first)
            part = slice(first, first + held)
            layer.inputs[:held] = self.inputs[part]
            if layer.norms:
                layer.normed[:held] = self.inputs[part]
            else:
                layer.residual[:held] = self.residual[part]
            parts.append(layer.rows_of(layer.run(TREE_TOKENS, held))[:held])
        return np.concatenate(parts)

    def is_unwritten(self, rows: NDArray[Any]) -> bool:
        if self.name in ("o", "down"):
            return bool((rows == UNWRITTEN).all())
        return bool(np.isnan(rows.astype(np.float32)).all())


def quantised_in_a_chunk(
    kernels: emulation.Kernels, rows: NDArray[np.float16], seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """`ull_chunk_quantise` of f16 [T, K]: e4m3 [512, K] and scales [512]; what was not written is no number."""
    state, activations, steps = chunk_of(len(rows)), pack_activations(rows), -(-rows.shape[1] // 32)
    output, scales = fast_buffer(rows.shape[1]), aligned(CHUNK_TOKENS, np.float32)
    params = ChunkQuantiseParams(pointer(state), pointer(activations), pointer(output), pointer(scales), steps)
    grid, threads, shared_bytes = chunk.quantise()
    kernels.run(
        "ull_chunk_quantise",
        grid=grid,
        threads=threads,
        shared_bytes=shared_bytes,
        params=params,
        seed=seed,
        predecessor_writes=[activations],
        earlier=[state],
    )
    return unpack_fast(output, rows.shape[1]), scales


def normed_in_a_chunk(
    kernels: emulation.Kernels, layer: Layer, count: int, fast: bool, seed: int = 0
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """`ull_chunk_norm` of the first `count` rows of a layer's residual: f16 or e4m3 [512, H], and scales [512]."""
    hidden = len(layer.norm_weight)
    state, scales = chunk_of(count), aligned(CHUNK_TOKENS, np.float32)
    residual = aligned((CHUNK_TOKENS, layer.residual.shape[1]), np.float32)
    residual[:count] = layer.residual[:count]
    output: NDArray[Any] = fast_buffer(hidden) if fast else activation_buffer(hidden)
    params = ChunkNormParams(
        chunk=pointer(state),
        residual=pointer(residual),
        norm_weight=pointer(layer.norm_weight),
        normed=pointer(output),
        token_scale=pointer(scales) if fast else None,
    )
    grid, threads, shared_bytes = chunk.norm(hidden, fast)
    kernels.run(
        "ull_chunk_norm",
        grid=grid,
        threads=threads,
        shared_bytes=shared_bytes,
        params=params,
        seed=seed,
        predecessor_writes=[residual],
        constants=[layer.norm_weight],
        earlier=[state],
    )
    return unpack_fast(output, hidden) if fast else unpack_activations(output, hidden), scales


ATTENTION_SOURCES = ("attention.cu", "commit.cu", "chunk_attention.cu")  # of an attention_rig.Shape


def attended_by_rounds(cache: Cache, rows: NDArray[np.float32], base: int) -> NDArray[np.float16]:
    """[T, A]: attention of a chain behind `base` positions, in rounds of 64 that leave keys and values in the pages."""
    parts = [rows[first : first + TREE_TOKENS] for first in range(0, len(rows), TREE_TOKENS)]
    rounds = [cache.round(part, base + i * TREE_TOKENS, tile=TREE_TOKENS) for i, part in enumerate(parts)]
    return np.concatenate(rounds)


def attended_in_a_chunk(
    cache: Cache,
    rows: NDArray[np.float32],
    base: int,
    seed: int = 0,
    multiprocessors: int = 1,
    is_shared: bool = False,
) -> NDArray[np.float16]:
    """[512, A]: the same of a chunk, whose keys and values are in the pages; what was not written is NaN.

    `multiprocessors`: as many blocks may share splits out; `is_shared`: some do, and leave results to be merged.
    """
    shape, state = cache.shape, chunk_of(len(rows), base)
    qkv = aligned((CHUNK_TOKENS, shape.width), np.float32)
    qkv[: len(rows)] = rows
    output = activation_buffer(shape.heads * shape.head_dim)
    counters = aligned(chunk.attention_counter_count(shape.heads), np.uint32, 0)
    partial = aligned(chunk.attention_partial_bytes(shape.heads, shape.head_dim, cache.context) // 4, np.float32)
    params = ChunkAttentionParams(
        chunk=pointer(state),
        qkv=pointer(qkv),
        q_norm=pointer(cache.norms[0]) if shape.qk_norm else None,
        rope=pointer(cache.rope),
        pages=pointer(cache.table),
        page_pool=pointer(cache.pool),
        kv_scale=pointer(cache.scale) if shape.kv_bits == 8 else None,
        output=pointer(output),
        page_bytes=cache.pool[0].nbytes,
        layer_offset=cache.layer * cache.pool[0, 0].nbytes,
        window=cache.window,
        partial=pointer(partial),
        counters=pointer(counters),
        blocks=chunk.shared_blocks(shape.heads, shape.kv_heads, multiprocessors),
        results=chunk.attention_results(cache.context),
    )
    grid, threads, shared_bytes = chunk.attention(shape.heads, shape.kv_heads, shape.head_dim)
    before, pages = cache.pool.tobytes(), [cache.pool[page] for page in cache.table]
    cache.kernels.run(
        "ull_chunk_attention",
        grid=grid,
        threads=threads,
        shared_bytes=shared_bytes,
        params=params,
        seed=seed,
        predecessor_writes=[qkv, *pages[base // PAGE_TOKENS :]],
        constants=cache.constants,
        earlier=[state, cache.table, *pages[: base // PAGE_TOKENS]],
    )
    assert cache.pool.tobytes() == before and not counters.any()
    assert np.isnan(partial).all() != is_shared
    return unpack_activations(output, shape.heads * shape.head_dim)


SOURCES = [
    *("begin", "accept", "commit", "embed", "attention", "attention_pages", "norm", "qkv", "output", "gate_up", "down"),
    *("chunk_embed", "chunk_norm", "chunk_store", "chunk_quantise", "chunk_linear", "chunk_attention"),
    *("head", "sample", "filter"),
]


class Prompt:
    """A model that reads a prompt behind `base` random positions: in chunks, or by rounds of 64 tokens.

    It may also draw what follows: at the end of a chunk, or in a round of the last token.
    """

    def __init__(
        self,
        model: Model,
        precision: Precision,
        biases: bool = False,
        taps: Sequence[int] = (),
        reports: bool = False,
        fast: bool = False,
    ) -> None:
        self.model = model
        kinds = {"chunks": True, "fast_prefill": fast, "warpgroup_trees": True}
        self.sizes = Sizes(model, precision, model.context, taps=taps, **kinds)
        forward = Forward(prefill="fast" if fast else "exact", tree_products="warpgroup")
        macros = numbers_of(device_macros(model, precision, taps=len(taps), forward=forward))
        self.kernels = emulation.build([f"{name}.cu" for name in SOURCES], macros, reports=reports)
        rng = np.random.default_rng(7)
        self.tensors = random_tensors(device_tensors(model, precision), rng, biases)
        self.tensors["embed.weight"] = aligned((model.vocabulary, model.hidden), ml_dtypes.bfloat16)
        self.tensors["embed.weight"][...] = rng.standard_normal((model.vocabulary, model.hidden))
        self._bytes = {name: region.nbytes for name, region in plan_memory(self.sizes, 0).regions.items()}
        stored = ml_dtypes.bfloat16 if precision.kv == "bf16" else ml_dtypes.float8_e4m3fn
        self._pages = rng.standard_normal(self._bytes["KV pages"] // np.dtype(stored).itemsize).astype(stored)
        self._table = rng.permutation(self.sizes.page_count).astype(np.int32)
        self.launched: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Memory as it is when the engine has been loaded, but for pages of random numbers."""
        host = {
            "requests": ROUND_SLOTS * ctypes.sizeof(RoundRequest),
            "results": ROUND_SLOTS * ctypes.sizeof(RoundResult),
            "control": ctypes.sizeof(HostControl),
            "pages": 4 * linear_layers.round_up(self.sizes.table_pages, 2),
            "text": 4 * self.sizes.context,
            "mask": self.sizes.mask_bytes,
            "chunks": 4 * ROUND_SLOTS * CHUNK_TOKENS,
        }
        self.host: dict[str, Any] = {name: aligned(nbytes, np.uint8, 0) for name, nbytes in host.items()}
        self.memory: dict[str, Any] = {
            name: aligned(nbytes, np.uint8, 0) for name, nbytes in self._bytes.items() if nbytes
        }
        self.memory["KV pages"][...] = self._pages.view(np.uint8)
        self.memory["rope"].view(np.float32)[...] = rope_table(self.model, self.model.context).reshape(-1)
        State.from_buffer(self.memory["state"]).sequence = 1
        self.host["pages"].view(np.int32)[: self.sizes.table_pages] = self._table
        if TAP_RING in self.memory:
            self.memory[TAP_RING][...] = 0xFF
        self._places = Places(
            lambda name: pointer(self.memory[name]),
            lambda name: pointer(self.tensors[name]) if name in self.tensors else None,
            HostBlocks(**{name: pointer(array) for name, array in self.host.items()}),
        )
        self.sequence = 0

    def read(self, tokens: Sequence[int], base: int, whole: bool, seed: int = 0, multiprocessors: int = 3) -> None:
        """`whole`: in one chunk; else by rounds of 64."""
        rounds = Rounds(self.sizes, self._places, multiprocessors)
        if whole:
            self.ask(tokens, base)
            self.run(Chunks(self.sizes, self._places, multiprocessors).launches(), seed)
            return
        forward = FusedForward(self.sizes, self._places, multiprocessors)
        layers = [*rounds.opening(TREE_TOKENS), *forward.launches(TREE_TOKENS, False)]
        for first in range(0, len(tokens), TREE_TOKENS):
            self.ask(tokens[first : first + TREE_TOKENS], base + first)
            self.run([*layers, *rounds.closing(TREE_TOKENS, False)], seed + first)

    def cancel(self) -> None:
        """Has the next round skipped."""
        HostControl.from_buffer(self.host["control"]).cancelled_through = self.sequence + 1

    def draw(self, tokens: Sequence[int], base: int, whole: bool, seed: int = 0, multiprocessors: int = 3) -> None:
        """Reads them, and draws what follows. `whole`: in one chunk; else by rounds, the last of one token."""
        if whole:
            self.ask(tokens, base, TAKE)
            self.run(Chunks(self.sizes, self._places, multiprocessors).launches(draws=True), seed)
            return
        self.read(tokens[:-1], base, False, seed, multiprocessors)
        rounds = Rounds(self.sizes, self._places, multiprocessors)
        forward = FusedForward(self.sizes, self._places, multiprocessors)
        self.ask(tokens[-1:], base + len(tokens) - 1, TAKE)
        self.run([*rounds.opening(1), *forward.launches(1, True), *rounds.closing(1, True)], seed + len(tokens))

    def ask(self, tokens: Sequence[int], base: int, mode: int = PREFILL) -> None:
        """Writes the next request, of prompt tokens."""
        self.sequence += 1
        slot = self.sequence % ROUND_SLOTS
        request = (RoundRequest * ROUND_SLOTS).from_buffer(self.host["requests"])[slot]
        request.sequence, request.mode, request.count, request.position = self.sequence, mode, len(tokens), base
        request.setting, request.page_count, request.max_tokens = 1, self.sizes.table_pages, 1
        request.forced = len(tokens) - 1 if mode == TAKE else 0
        request.sampling = Sampling(temperature=0.7, top_p=0.95, seed=11, top_logprobs=5)
        request.tokens[: min(len(tokens), TREE_TOKENS)] = tokens[:TREE_TOKENS]
        self.host["chunks"].view(np.int32).reshape(ROUND_SLOTS, -1)[slot, : len(tokens)] = tokens

    def run(self, launches: Sequence[Launch], seed: int) -> None:
        self.launched.update(launch.kernel for launch in launches)
        # What begin writes, and earlier rounds wrote, may be read early behind embed.
        written = [self.memory[name][:MOST_HIDDEN] for name in WRITTEN if name in self.memory]
        opening, others = list(launches[:2]), list(launches[2:])
        earlier = [self.memory[name] for name in (CHUNK, "round", "page table", "KV pages")]
        requested = [self.host[name] for name in ("requests", "control", "pages", "chunks")]
        results = [self.host["results"]]
        constants = [*self.tensors.values(), self.memory["rope"]]
        emulation.run_launches(
            self.kernels,
            opening,
            1000 * seed,
            [self.memory["state"], *written],
            [*constants, *requested],
            host_reads=results,
        )
        emulation.run_launches(self.kernels, others, 1000 * seed + 2, written, constants, earlier, results)

    def result(self) -> RoundResult:
        """Of the last request."""
        result: RoundResult = (RoundResult * ROUND_SLOTS).from_buffer(self.host["results"])[self.sequence % ROUND_SLOTS]
        return result

    def drawn(self) -> dict[str, Any]:
        """What a draw leaves: its answer, and what rounds and heads behind it go on from."""
        result, state = self.result(), State.from_buffer_copy(self.memory["state"])
        state.sequence = 0  # of how many rounds it was
        round_ = Round.from_buffer(self.memory["round"])
        assert (result.status, result.count, round_.count, round_.draws) == (OK, 1, 1, 1)
        logits = self.memory["logits"].view(np.float32)[: self.model.vocabulary]
        residual = self.memory["residual"].view(np.float32)[: self.model.hidden]
        return {
            "token": bytes(result.tokens[0]),
            "stopped": result.stopped,
            "state": bytes(state),
            "root": (round_.base, round_.tokens[0], round_.depths[0], round_.path[0][0]),
            "logits": logits.tobytes(),
            "residual": residual.tobytes(),
        }

    def left(self) -> dict[str, bytes]:
        """What a prompt leaves for whoever comes behind it."""
        return {name: self.memory[name].tobytes() for name in ("KV pages", TAP_RING, "counters") if name in self.memory}


# Regions that a chunk's or a round's kernels hand to each other. It takes time to hide them from every block: so many
# bytes of each are enough.
MOST_HIDDEN = 1 << 19
WRITTEN = (
    *(CHUNK_RESIDUAL, CHUNK_NORMED, CHUNK_QKV, CHUNK_ATTENTION, CHUNK_MLP),
    *(CHUNK_PARTIAL, CHUNK_QUANTISED, CHUNK_SCALES),
    *("residual", "normed", "qkv", "attention", "attention parts", "mlp", "partial sums"),
    *("logits", "sampler"),
)
