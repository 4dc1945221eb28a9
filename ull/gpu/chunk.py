"""The launches that read a chunk of a prompt, in order: pure lists, as `ull.gpu.rounds`.

    begin, embed, L x { norm, qkv, store, attention, o, norm, gate_up, down }, accept
    begin, embed, L x { norm, qkv, store, attention, o, norm, gate_up, down }, norm, head, sample*, accept

A chunk fills the cache. The second also draws what follows its last token, with the bits of a round of that token alone
behind the others, which would read the weights once more. Linear layers and attention take all tokens at once, on
warpgroups' products; attention finds each token's key and value in the pages, where `store` has put them. Each bit is
what rounds of 64 tokens would make of it.

Of up to CHUNK_TILE tokens o and down leave the sums of their slices, and the norm behind them adds these.

Fast, the linear layers multiply e4m3 by e4m3: norm leaves such activations, and quantise stands before o and down.
"""

from __future__ import annotations

from ctypes import addressof, c_uint32

from ull.gpu.driver import Driver
from ull.gpu.fused import FusedForward, Unfinished
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
)
from ull.gpu.modules import Kernels
from ull.gpu.params import (
    CHUNK_TOKENS,
    MLP_SCALE,
    ChunkAttentionParams,
    ChunkEmbedParams,
    ChunkLinearParams,
    ChunkNormParams,
    ChunkProbeParams,
    ChunkQuantiseParams,
    ChunkStoreParams,
)
from ull.gpu.places import Places
from ull.gpu.rounds import Rounds

PROBE_ROUNDS = 2  # of each block; a round compares 64 sums for each token of a tile, and for 8, of 8 products each


def products_agree(driver: Driver, kernels: Kernels, stream: int) -> bool:
    """Whether products of warpgroups have the bits of a warp's on this device; seen on two million random sums.

    That the probe would see another bit is seen as well. Raises GpuError.
    """
    memory = driver.allocate(8)
    try:
        driver.fill(memory, 0, 8, stream)
        for flaw in (0, 1):
            params = ChunkProbeParams(differences=memory + 4 * flaw, seed=1 + flaw, rounds=PROBE_ROUNDS, flaw=flaw)
            grid, threads, shared_bytes = chunk.probe(driver.info.multiprocessors)
            function = kernels.functions["ull_chunk_probe"]
            driver.launch(function, grid, threads, shared_bytes, stream, params, False)
        differences = (c_uint32 * 2)()
        driver.copy_to_host(addressof(differences), memory, 8, stream)
        driver.synchronise(stream)
        return differences[0] == 0 and differences[1] > 0
    finally:
        driver.free(memory)


def product(kernel: str, rows: int, multiprocessors: int, params: ChunkLinearParams) -> Launch:
    """A linear layer of that many rows, with padding. Sets `params.whole`, which its grid is for."""
    kind = params.partial is not None, params.token_scale is not None
    params.whole = chunk.whole_clusters(rows, multiprocessors, *kind)
    return Launch(kernel, *chunk.product(rows, multiprocessors, *kind), params)


def store(sizes: Sizes, places: Places, layer: int) -> Launch:
    """What puts a layer's keys and values of a chunk, in `CHUNK_QKV`, into the pages."""
    region, tensor = places.region, places.tensor
    params = ChunkStoreParams(
        chunk=region(CHUNK),
        qkv=region(CHUNK_QKV),
        k_norm=tensor(f"layers.{layer}.k_norm"),
        rope=region("rope"),
        pages=region("page table"),
        page_pool=region("KV pages"),
        kv_scale=tensor(f"layers.{layer}.kv_scale"),
        page_bytes=sizes.page_bytes,
        layer_offset=layer * sizes.layer_page_bytes,
    )
    return Launch("ull_chunk_store", *chunk.store(sizes.model.kv_heads, sizes.model.head_dim), params)


class Chunks:
    """Builds them, for one model."""

    def __init__(self, sizes: Sizes, places: Places, multiprocessors: int) -> None:
        self._sizes, self._places, self._multiprocessors = sizes, places, multiprocessors
        self._rounds = Rounds(sizes, places, multiprocessors)

    def launches(self, draws: bool = False) -> list[Launch]:
        """`draws`: behind the last token."""
        layers = self._sizes.model.layers
        # Keys and values are in the pages: as behind a round of one token nothing is committed.
        return [
            *self._opening(),
            *(launch for layer in range(layers) for launch in self._layer(layer)),
            *self._ending(draws),
            *(FusedForward(self._sizes, self._places, self._multiprocessors).logits(1, alone=True) if draws else []),
            *self._rounds.closing(1, draws),
        ]

    def _ending(self, draws: bool) -> list[Launch]:
        """What keeps the residual that leaves the last layer: of all tokens if a head reads it, of the last to draw."""
        layers = self._sizes.model.layers
        if not draws and layers not in self._sizes.taps:
            return []
        row = self._places.region("residual") if draws else None
        return [self._norm("norm", self._down(layers - 1), layers, normed=False, last=row)]

    def _opening(self) -> list[Launch]:
        """embed does not begin before begin has ended: see `Rounds.opening`."""
        region = self._places.region
        table = self._places.tensor("embed.weight")
        embed = ChunkEmbedParams(chunk=region(CHUNK), table=table, residual=region(CHUNK_RESIDUAL))
        geometry = chunk.embed(self._sizes.model.hidden)
        return [self._rounds.begin(chunk=True), Launch("ull_chunk_embed", *geometry, embed, overlaps=False)]

    def _layer(self, layer: int) -> list[Launch]:
        model, name = self._sizes.model, f"layers.{layer}"
        gate_up_rows = 2 * -(-model.intermediate // 8) * 8
        return [
            self._norm(f"{name}.attn_norm", self._down(layer - 1), layer),
            self._product("qkv", f"{name}.qkv", self._sizes.qkv_width, CHUNK_NORMED, CHUNK_QKV),
            store(self._sizes, self._places, layer),
            self._attention(layer),
            *self._quantised(CHUNK_ATTENTION, self._sizes.attention_width),
            self._product("o", f"{name}.o", model.hidden, CHUNK_ATTENTION, CHUNK_RESIDUAL),
            self._norm(f"{name}.mlp_norm", self._left(f"{name}.o", 1.0)),
            self._product("gate_up", f"{name}.gate_up", gate_up_rows, CHUNK_NORMED, CHUNK_MLP),
            *self._quantised(CHUNK_MLP, model.intermediate),
            self._product("down", f"{name}.down", model.hidden, CHUNK_MLP, CHUNK_RESIDUAL),
        ]

    @property
    def _scales(self) -> int | None:
        return self._places.region(CHUNK_SCALES) if self._sizes.fast_prefill else None

    def _left(self, weights: str, unit: float) -> Unfinished | None:
        """What those weights' layer leaves of few tokens; nothing where prompts are read fast."""
        if self._sizes.fast_prefill:
            return None
        scale, bias = (self._places.tensor(f"{weights}.{kind}") for kind in ("scale", "bias"))
        return Unfinished(self._places.region(CHUNK_PARTIAL), scale, bias, unit)

    def _down(self, layer: int) -> Unfinished | None:
        """What the layer's down leaves; nothing does before the first layer."""
        return None if layer < 0 else self._left(f"layers.{layer}.down", 1 / MLP_SCALE)

    def _norm(
        self,
        weight: str,
        before: Unfinished | None,
        layer: int | None = None,
        normed: bool = True,
        last: int | None = None,
    ) -> Launch:
        """`before`: what the layer before leaves. `layer`: whose input the residual is; heads may want it kept.

        `normed`: the norm itself is wanted. `last`: where the last token's residual goes.
        """
        sizes, region, taps = self._sizes, self._places.region, None
        if layer in sizes.taps:
            taps = region(TAP_RING) + sizes.taps.index(layer) * sizes.tap_bytes
        fast = sizes.fast_prefill
        params = ChunkNormParams(
            chunk=region(CHUNK),
            residual=region(CHUNK_RESIDUAL),
            norm_weight=self._places.tensor(weight),
            normed=region(CHUNK_QUANTISED if fast else CHUNK_NORMED) if normed else None,
            taps=taps,
            token_scale=self._scales,
            last=last,
        )
        if before is not None:
            params.partial, params.unit = before.partial, before.unit
            params.scale, params.bias = before.scale, before.bias
        tokens = CHUNK_TOKENS if normed or taps else 1
        return Launch("ull_chunk_norm", *chunk.norm(sizes.model.hidden, fast, tokens), params)

    def _quantised(self, activations: str, width: int) -> list[Launch]:
        """What makes e4m3 of f16 activations; nothing where the products take these."""
        if not self._sizes.fast_prefill:
            return []
        region = self._places.region
        params = ChunkQuantiseParams(
            chunk=region(CHUNK),
            activations=region(activations),
            quantised=region(CHUNK_QUANTISED),
            token_scale=self._scales,
            steps=-(-width // 32),
        )
        return [Launch("ull_chunk_quantise", *chunk.quantise(), params)]

    def _product(self, kernel: str, weights: str, rows: int, activations: str, output: str) -> Launch:
        region, tensor = self._places.region, self._places.tensor
        params = ChunkLinearParams(
            chunk=region(CHUNK),
            weights=tensor(f"{weights}.weight"),
            scale=tensor(f"{weights}.scale"),
            bias=tensor(f"{weights}.bias"),
            activations=region(CHUNK_QUANTISED if self._sizes.fast_prefill else activations),
            output=region(output),
            token_scale=self._scales,
        )
        if kernel in ("o", "down") and not self._sizes.fast_prefill:
            params.partial = region(CHUNK_PARTIAL)
        return product(f"ull_chunk_{kernel}", rows, self._multiprocessors, params)

    def _attention(self, layer: int) -> Launch:
        sizes, model, region, tensor = self._sizes, self._sizes.model, self._places.region, self._places.tensor
        params = ChunkAttentionParams(
            chunk=region(CHUNK),
            qkv=region(CHUNK_QKV),
            q_norm=tensor(f"layers.{layer}.q_norm"),
            rope=region("rope"),
            pages=region("page table"),
            page_pool=region("KV pages"),
            kv_scale=tensor(f"layers.{layer}.kv_scale"),
            output=region(CHUNK_ATTENTION),
            partial=region("attention parts"),
            counters=region("counters") + 4 * sizes.chunk_counter,
            page_bytes=sizes.page_bytes,
            layer_offset=layer * sizes.layer_page_bytes,
            window=model.windows[layer],
            blocks=chunk.shared_blocks(model.heads, model.kv_heads, self._multiprocessors),
            results=chunk.attention_results(sizes.context),
        )
        return Launch("ull_chunk_attention", *chunk.attention(model.heads, model.kv_heads, model.head_dim), params)
