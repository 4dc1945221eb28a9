"""The launches of a round, in order, with every pointer: pure lists, so that they can be tested without a driver.

    begin, embed, L x { [norm], qkv, attention, o, [norm], gate_up, down }, [norm], head, sample*, accept, commit

A prefill leaves out the head and the sampler. From 16 tokens on a kernel of its own normalises; below, the linear
kernels do it on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ull.gpu.forward import Recorder
from ull.gpu.launch import Launch, tile_of
from ull.gpu.launches import attention, linear, sampling
from ull.gpu.memory import Sizes
from ull.gpu.params import (
    AcceptParams,
    AttentionParams,
    BeginParams,
    CommitParams,
    EmbedParams,
    LinearParams,
    NormParams,
    SampleParams,
)

_FUSED_NORM = 8  # most tokens for which the linear kernels normalise


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

    def closing(self, tokens: int) -> list[Launch]:
        """The final norm, the lm_head, the sampler, then what a prefill also does."""
        region, model = self._places.region, self._sizes.model
        linears = Linears(self._places, tokens)
        geometry = linear.head(model.hidden, model.vocabulary, linears.tile, self._multiprocessors)
        launches = [*linears.normalised("head", "lm_head", "norm", geometry, output="logits")]
        sample = SampleParams(
            round=region("round"),
            state=region("state"),
            logits=region("logits"),
            scratch=region("sampler"),
            counters=self._counters(self._sizes.model.layers * self._sizes.attention_counters),
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

    def _layer(self, layer: int, tokens: int) -> list[Launch]:
        model, sizes, blocks = self._sizes.model, self._sizes, self._multiprocessors
        linears, name = Linears(self._places, tokens), f"layers.{layer}"
        tile = linears.tile
        qkv = linear.qkv(model.hidden, sizes.qkv_width, tile, blocks)
        o = linear.o(model.hidden, sizes.attention_width, tile, blocks)
        gate_up = linear.gate_up(model.hidden, model.intermediate, tile, blocks)
        down = linear.down(model.hidden, model.intermediate, tile, blocks)
        return [
            *linears.normalised("qkv", f"{name}.qkv", f"{name}.attn_norm", qkv, output="qkv"),
            self._attention(layer, tokens),
            linears.plain("o", f"{name}.o", o, activations="attention", output="residual"),
            *linears.normalised("gate_up", f"{name}.gate_up", f"{name}.mlp_norm", gate_up, output="mlp"),
            linears.plain("down", f"{name}.down", down, activations="mlp", output="residual"),
        ]

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

    def normalised(self, kernel: str, weights: str, norm: str, geometry: linear.Geometry, output: str) -> list[Launch]:
        """A linear of the normalised residual: one launch, or two from 16 tokens on."""
        region, tensor = self._places.region, self._places.tensor
        launches = []
        if self.tile > _FUSED_NORM:
            params = NormParams(
                round=region("round"),
                residual=region("residual"),
                norm_weight=tensor(norm),
                normed=region("normed"),
            )
            launches.append(Launch(f"ull_norm_{self.tile}", *linear.norm(self.tile), params))
        return [*launches, self._linear(kernel, weights, geometry, "normed", output, norm)]

    def plain(self, kernel: str, weights: str, geometry: linear.Geometry, activations: str, output: str) -> Launch:
        """A linear of what the kernel before it has written."""
        return self._linear(kernel, weights, geometry, activations, output, None)

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
        )
        return Launch(f"ull_{kernel}_{self.tile}", *geometry, params)
