"""Our attention between a layer's QKV and its O, which every forward source captures.

The kernel for one token writes that one's keys and values to its page; the others leave those of all nodes in the tree
scratch, for the commit. From 16 tokens on, where warpgroups multiply, another kernel takes what lies in the pages of a
long cache.
"""

from __future__ import annotations

from ull.gpu.geometry import attention
from ull.gpu.geometry.linear import is_split
from ull.gpu.launch import Launch
from ull.gpu.memory import Sizes
from ull.gpu.params import AttentionParams
from ull.gpu.places import Places


class PagedAttention:
    """From "qkv" [64, Q] f32 to "attention", f16 activations of width A. `wide`: for a long cache, of few tokens."""

    def __init__(self, sizes: Sizes, places: Places, multiprocessors: int, wide: bool = False) -> None:
        self._sizes, self._places, self._multiprocessors, self._wide = sizes, places, multiprocessors, wide

    def launches(self, layer: int, tokens: int) -> list[Launch]:
        """QK norm, RoPE and attention of one layer over up to `tokens` nodes (1 to 64)."""
        region, tensor, sizes = self._places.region, self._places.tensor, self._sizes
        name, tile = f"layers.{layer}", attention.tile_of(tokens)
        params = AttentionParams(
            round=region("round"),
            qkv=region("qkv"),
            q_norm=tensor(f"{name}.q_norm"),
            k_norm=tensor(f"{name}.k_norm"),
            rope=region("rope"),
            pages=region("page table"),
            page_pool=region("KV pages"),
            tree_keys=region("tree keys") + layer * sizes.tree_bytes,
            tree_values=region("tree values") + layer * sizes.tree_bytes,
            kv_scale=tensor(f"{name}.kv_scale"),
            partial=region("attention parts"),
            counters=region("counters") + 4 * layer * sizes.attention_counters,
            output=region("attention"),
            page_bytes=sizes.page_bytes,
            layer_offset=layer * sizes.layer_page_bytes,
            window=sizes.model.windows[layer],
            splits=attention.splits(sizes.context),
            o_weights=tensor(f"{name}.o.weight"),
            gate_up_weights=tensor(f"{name}.gate_up.weight"),
            linear_blocks=self._multiprocessors,
        )
        model = sizes.model
        shape = (model.heads, model.kv_heads, model.head_dim, sizes.kv_bits, sizes.context, tile, self._multiprocessors)
        geometry = attention.attention(*shape, self._wide, sizes.warpgroup_trees)
        launches = [Launch(f"ull_attention_{tile}", *geometry, params)]
        pages = attention.of_pages(*shape) if sizes.warpgroup_trees and is_split(tile) else None
        if pages is not None:
            params.page_blocks = pages[0][0]
            launches.insert(0, Launch("ull_attention_pages", *pages, params))
        return launches
