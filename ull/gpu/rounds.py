"""The launches of a round, in order, with every pointer: pure lists, so that they can be tested without a driver.

    begin, embed, L x { qkv, attention, o, gate_up, down }, head, sample*, accept, commit

A prefill leaves out the head and the sampler. From 16 tokens on a kernel of its own normalises before qkv, gate_up and
head, and finishes what the layer before left in partial sums; qkv's own are finished by qkv_sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ull.gpu.forward import Recorder, Unfinished
from ull.gpu.launch import Launch, tile_of
from ull.gpu.launches import attention, linear, sampling
from ull.gpu.memory import Sizes
from ull.gpu.params import (
    MLP_SCALE,
    AcceptParams,
    AttentionParams,
    BeginParams,
    CommitParams,
    EmbedParams,
    LinearParams,
    NormParams,
    SampleParams,
)


@dataclass(frozen=True)
class HostBlocks:
    """Device addresses of the mapped host blocks."""

    requests: int  # RoundRequest[ROUND_SLOTS]
    results: int  # RoundResult[ROUND_SLOTS]
    control: int  # HostControl
    pages: int  # int32 [table pages]


@dataclass(frozen=True)
class Places:
    """Where things lie on the device. `region` knows the arena's names, `tensor` the weights'; absent ones are None."""

    region: Callable[[str], int]
    tensor: Callable[[str], int | None]
    host: HostBlocks


class Rounds:
    """Builds the launches around a forward: what starts a round, and what ends it."""

    def __init__(self, sizes: Sizes, places: Places, multiprocessors: int) -> None:
        self._sizes, self._places, self._multiprocessors = sizes, places, multiprocessors

    def opening(self, tokens: int) -> list[Launch]:
        """begin and embed."""
        region, host, sizes = self._places.region, self._places.host, self._sizes
        begin = BeginParams(
            round=region("round"),
            state=region("state"),
            requests=host.requests,
            control=host.control,
            host_pages=host.pages,
            pages=region("page table"),
            counters=region("counters"),
            counter_count=sizes.counter_count,
            page_capacity=sizes.table_pages,
        )
        embed = EmbedParams(
            round=region("round"), table=self._places.tensor("embed.weight"), residual=region("residual")
        )
        return [
            Launch("ull_begin", *sampling.begin(), begin),
            Launch("ull_embed", *sampling.embed(sizes.model.hidden, tokens), embed),
        ]

    def closing(self, tokens: int, unfinished: Unfinished | None) -> list[Launch]:
        """The final norm, the lm_head, the sampler, then what a prefill also does. `unfinished`: see Forward."""
        region, model = self._places.region, self._sizes.model
        linears = Linears(self._places, tokens)
        geometry = linear.head(model.hidden, model.vocabulary, linears.tile, self._multiprocessors)
        launches = [*linears.normalised("head", "lm_head", "norm", geometry, "logits", unfinished)]
        sample = SampleParams(
            round=region("round"),
            state=region("state"),
            logits=region("logits"),
            scratch=region("sampler"),
        )
        for kernel in sampling.SAMPLING:
            geometry = sampling.sample(kernel, model.vocabulary, tokens, self._multiprocessors)
            launches.append(Launch(kernel, *geometry, sample))
        return launches + self.prefill_closing()

    def prefill_closing(self) -> list[Launch]:
        """accept and commit."""
        region, sizes, host = self._places.region, self._sizes, self._places.host
        accept = AcceptParams(round=region("round"), state=region("state"), results=host.results)
        commit = CommitParams(
            round=region("round"),
            pages=region("page table"),
            page_pool=region("KV pages"),
            tree_keys=region("tree keys"),
            tree_values=region("tree values"),
            results=host.results,
            counters=self._counters(sizes.counter_count - 1),
            page_bytes=sizes.page_bytes,
        )
        return [
            Launch("ull_accept", *sampling.accept(), accept),
            Launch("ull_commit", *attention.commit(sizes.model.kv_heads, sizes.model.layers), commit),
        ]

    def _counters(self, first: int) -> int:
        return self._places.region("counters") + 4 * first


class FusedForward:
    """Our own kernels as the forward source."""

    name = "fused"

    def __init__(self, sizes: Sizes, places: Places, multiprocessors: int) -> None:
        self._sizes, self._places, self._multiprocessors = sizes, places, multiprocessors

    def launches(self, tokens: int) -> list[Launch]:
        return [launch for layer in range(self._sizes.model.layers) for launch in self._layer(layer, tokens)]

    def capture(self, recorder: Recorder, tokens: int) -> None:
        for launch in self.launches(tokens):
            recorder.launch(launch)

    def unfinished(self, tokens: int) -> Unfinished | None:
        return self._after_down(self._sizes.model.layers - 1, tokens)

    def _layer(self, layer: int, tokens: int) -> list[Launch]:
        model, sizes, blocks = self._sizes.model, self._sizes, self._multiprocessors
        linears, name = Linears(self._places, tokens), f"layers.{layer}"
        tile = linears.tile
        qkv = linear.qkv(model.hidden, sizes.qkv_width, tile, blocks)
        o = linear.o(model.hidden, sizes.attention_width, tile, blocks)
        gate_up = linear.gate_up(model.hidden, model.intermediate, tile, blocks)
        down = linear.down(model.hidden, model.intermediate, tile, blocks)
        before = self._after_down(layer - 1, tokens)
        return [
            *linears.normalised("qkv", f"{name}.qkv", f"{name}.attn_norm", qkv, "qkv", before),
            *linears.summed("qkv", f"{name}.qkv", linear.qkv_sum(sizes.qkv_width, tile), "qkv"),
            self._attention(layer, tokens),
            linears.plain("o", f"{name}.o", o, activations="attention"),
            *linears.normalised(
                "gate_up", f"{name}.gate_up", f"{name}.mlp_norm", gate_up, "mlp", linears.unfinished(f"{name}.o", 1.0)
            ),
            linears.plain("down", f"{name}.down", down, activations="mlp"),
        ]

    def _after_down(self, layer: int, tokens: int) -> Unfinished | None:
        """What this layer's down leaves; nothing does before the first layer."""
        if layer < 0:
            return None
        return Linears(self._places, tokens).unfinished(f"layers.{layer}.down", 1 / MLP_SCALE)

    def _attention(self, layer: int, tokens: int) -> Launch:
        region, tensor, sizes = self._places.region, self._places.tensor, self._sizes
        name, tile = f"layers.{layer}", tile_of(tokens)
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
        )
        model = sizes.model
        geometry = attention.attention(
            model.heads, model.kv_heads, model.head_dim, sizes.kv_bits, sizes.context, tile, self._multiprocessors
        )
        return Launch(f"ull_attention_{tile}", *geometry, params)


class Linears:
    """Launches of linear layers and the norms before them, for one number of tokens."""

    def __init__(self, places: Places, tokens: int) -> None:
        self._places = places
        self.tile = linear.tile_of(tokens)

    def normalised(
        self,
        kernel: str,
        weights: str,
        norm: str,
        geometry: linear.Geometry,
        output: str,
        unfinished: Unfinished | None,
    ) -> list[Launch]:
        """A linear of the normalised residual: one launch, or from 16 tokens on two, once `unfinished` is added."""
        region, tensor = self._places.region, self._places.tensor
        launches = []
        if linear.is_split(self.tile):
            params = NormParams(
                round=region("round"),
                residual=region("residual"),
                norm_weight=tensor(norm),
                normed=region("normed"),
            )
            if unfinished is not None:
                params.partial, params.scale, params.bias = unfinished.partial, unfinished.scale, unfinished.bias
                params.unit = unfinished.unit
            launches.append(Launch(f"ull_norm_{self.tile}", *linear.norm(self.tile), params))
        return [*launches, self._linear(kernel, weights, geometry, "normed", output, norm)]

    def summed(self, kernel: str, weights: str, geometry: linear.Geometry, output: str) -> list[Launch]:
        """What turns a split layer's partial sums into its output; nothing where it is not split."""
        if not linear.is_split(self.tile):
            return []
        return [self._linear(f"{kernel}_sum", weights, geometry, "normed", output, None)]

    def plain(self, kernel: str, weights: str, geometry: linear.Geometry, activations: str) -> Launch:
        """A linear of what the kernel before it has written, added to the residual."""
        return self._linear(kernel, weights, geometry, activations, "residual", None)

    def unfinished(self, weights: str, unit: float) -> Unfinished | None:
        """What a split layer that adds to the residual has left undone."""
        if not linear.is_split(self.tile):
            return None
        tensor = self._places.tensor
        return Unfinished(
            self._places.region("partial sums"), tensor(f"{weights}.scale"), tensor(f"{weights}.bias"), unit
        )

    def _linear(
        self, kernel: str, weights: str, geometry: linear.Geometry, activations: str, output: str, norm: str | None
    ) -> Launch:
        region, tensor = self._places.region, self._places.tensor
        params = LinearParams(
            round=region("round"),
            weights=tensor(f"{weights}.weight"),
            scale=tensor(f"{weights}.scale"),
            bias=tensor(f"{weights}.bias"),
            residual=region("residual"),
            norm_weight=None if norm is None else tensor(norm),
            activations=region(activations),
            output=region(output),
            partial=region("partial sums"),
        )
        return Launch(f"ull_{kernel}_{self.tile}", *geometry, params)
