"""Our own kernels as the forward source.

    L x { qkv, attention, o, gate_up, down }, head

For one token all layers can be one persistent kernel instead of five each. From 16 tokens on a kernel of its own
normalises before qkv, gate_up and head, and finishes what the layer before left in partial sums; qkv's own are finished
by qkv_sum. Then attention may be two kernels (`ull.gpu.paged_attention`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ull.bundle import HEAD_SCAN
from ull.gpu.forward import Recorder
from ull.gpu.geometry import linear, sampling
from ull.gpu.launch import Launch
from ull.gpu.memory import TAP_RING, TAP_ROWS, Sizes
from ull.gpu.paged_attention import PagedAttention
from ull.gpu.params import MLP_SCALE, LayersParams, LinearParams, NormParams
from ull.gpu.places import Places


@dataclass(frozen=True)
class Unfinished:
    """Partial sums that the next norm still has to add to the residual: `NormParams` says how. Device addresses."""

    partial: int
    scale: int | None
    bias: int | None
    unit: float


class FusedForward:
    """Builds the launches of the forward, layer by layer.

    `persistent`: all layers of a round of one token are one launch. Then "layer parameters" must hold
    `layer_parameters` before the first round. `scans`: for one token, the logits are those of the lm_head's FP8 copy.
    `wide`: of few tokens behind a long cache, with twice as many blocks of attention.
    """

    name = "fused"

    def __init__(
        self,
        sizes: Sizes,
        places: Places,
        multiprocessors: int,
        persistent: bool = False,
        scans: bool = False,
        wide: bool = False,
    ) -> None:
        self._sizes, self._places, self._multiprocessors = sizes, places, multiprocessors
        self._persistent, self._scans = persistent, scans
        self._attention = PagedAttention(sizes, places, multiprocessors, wide)

    def launches(self, tokens: int, draws: bool) -> list[Launch]:
        if self._persistent and tokens == 1:
            layers = [self._all_layers()]
        else:
            layers = [launch for layer in range(self._sizes.model.layers) for launch in self._layer(layer, tokens)]
        return layers + (self.logits(tokens) if draws else self._last_tap(tokens))

    def logits(self, tokens: int, alone: bool = False) -> list[Launch]:
        """The final norm, which perhaps keeps the residual for a head, and the lm_head.

        `alone`: no two blocks of a head of one token may fit on a multiprocessor, since down's are not beside them.
        """
        model = self._sizes.model
        linears = self._linears(tokens)
        geometry = linear.head(model.vocabulary, linears.tile, self._multiprocessors)
        if alone:
            geometry = linear.alone(geometry)
        tap = self._tap(model.layers, tokens)
        if self._scans and tokens == 1:
            return linears.normalised("head_scan", HEAD_SCAN, "norm", geometry, "logits", None, tap)
        before = self._after_down(model.layers - 1, tokens)
        launches = linears.normalised("head", "lm_head", "norm", geometry, "logits", before, tap)
        if tokens == 1:
            launches[-1].params.maxima = self._places.region("sampler") + sampling.MAXIMA_AT
        return launches

    def layer_parameters(self) -> bytes:
        """`LayerParams` of every layer: what the kernels of its steps would be launched with."""
        parameters = b""
        for layer in range(self._sizes.model.layers):
            qkv, attention, *others = self._layer(layer, 1)
            parameters += b"".join(bytes(launch.params) for launch in (qkv, *others, attention))
        return parameters

    def warm_up(self, tokens: int, draws: bool) -> None:
        """Nothing: modules are loaded as a whole."""

    def abandon(self) -> None:
        """It holds nothing."""

    def capture(self, recorder: Recorder, tokens: int, draws: bool) -> None:
        for launch in self.launches(tokens, draws):
            recorder.launch(launch)

    def _all_layers(self) -> Launch:
        region = self._places.region
        params = LayersParams(
            round=region("round"),
            layers=region("layer parameters"),
            arrivals=region("counters") + 4 * self._sizes.layers_counter,
        )
        return Launch("ull_layers_1", *linear.layers(self._multiprocessors), params, meets=True)

    def _layer(self, layer: int, tokens: int) -> list[Launch]:
        model, blocks = self._sizes.model, self._multiprocessors
        linears, name = self._linears(tokens), f"layers.{layer}"
        tile = linears.tile
        attended = self._attended(layer, tokens)
        grid, shared_bytes = attended[-1].grid, attended[-1].shared_bytes
        o = linear.o(model.hidden, tile, blocks, grid[0] * grid[1], shared_bytes)
        gate_up = linears.normalised(
            "gate_up",
            f"{name}.gate_up",
            f"{name}.mlp_norm",
            linear.gate_up(model.intermediate, tile, blocks),
            "mlp",
            linears.unfinished(f"{name}.o", 1.0),
        )
        down = linear.down(model.hidden, tile, blocks, gate_up[-1].shared_bytes)
        return [
            *attended,
            linears.plain("o", f"{name}.o", o, activations="attention"),
            *gate_up,
            linears.plain("down", f"{name}.down", down, activations="mlp"),
        ]

    def _attended(self, layer: int, tokens: int) -> list[Launch]:
        """From the layer's input to its attention's output."""
        linears = self._linears(tokens)
        geometry = linear.qkv_sum(self._sizes.qkv_width, linears.tile)
        return [
            *self._qkv(layer, tokens),
            *linears.summed("qkv", f"layers.{layer}.qkv", geometry, "qkv"),
            *self._attention.launches(layer, tokens),
        ]

    def _qkv(self, layer: int, tokens: int) -> list[Launch]:
        """The layer's queries, keys and values, perhaps in slices."""
        linears, name = self._linears(tokens), f"layers.{layer}"
        geometry = linear.qkv(self._sizes.qkv_width, linears.tile, self._multiprocessors)
        before, tap = self._after_down(layer - 1, tokens), self._tap(layer, tokens)
        return linears.normalised("qkv", f"{name}.qkv", f"{name}.attn_norm", geometry, "qkv", before, tap)

    def _after_down(self, layer: int, tokens: int) -> Unfinished | None:
        """What this layer's down leaves; nothing does before the first layer."""
        if layer < 0:
            return None
        return self._linears(tokens).unfinished(f"layers.{layer}.down", 1 / MLP_SCALE)

    def _tap(self, layer: int, tokens: int) -> int | None:
        """Where the residual that enters the layer is kept, if a head reads it; behind the last one: that leaves it."""
        sizes = self._sizes
        if layer not in sizes.taps:
            return None
        rows = self._places.region(TAP_RING if linear.tile_of(tokens) == 1 else TAP_ROWS)
        return rows + sizes.taps.index(layer) * sizes.tap_bytes

    def _last_tap(self, tokens: int) -> list[Launch]:
        """What keeps the residual that leaves the last layer where no head does: the final norm."""
        layers = self._sizes.model.layers
        tap = self._tap(layers, tokens)
        if tap is None:
            return []
        return [self._linears(tokens).norm("norm", self._after_down(layers - 1, tokens), tap)]

    def _linears(self, tokens: int) -> Linears:
        return Linears(self._places, self._sizes.model.hidden, tokens)


class Linears:
    """Launches of linear layers and the norms before them, for one number of tokens."""

    def __init__(self, places: Places, hidden: int, tokens: int) -> None:
        self._places = places
        self._hidden = hidden
        self.tile = linear.tile_of(tokens)

    def normalised(
        self,
        kernel: str,
        weights: str,
        norm: str,
        geometry: linear.Geometry,
        output: str,
        unfinished: Unfinished | None,
        tap: int | None = None,
    ) -> list[Launch]:
        """A linear of the normalised residual: one launch, or two where it norms apart, once `unfinished` is added.

        `tap`: where the residual is kept.
        """
        if linear.norms_apart(self._hidden, self.tile):
            apart = self._linear(kernel, weights, linear.alone(geometry), "normed", output, norm)
            return [self.norm(norm, unfinished, tap), apart]
        launch = self._linear(kernel, weights, geometry, "normed", output, norm)
        launch.params.taps = tap
        return [launch]

    def norm(self, norm: str, unfinished: Unfinished | None, tap: int | None) -> Launch:
        """RMSNorm of the residual in a launch of its own. The arguments are `normalised`'s."""
        region = self._places.region
        params = NormParams(
            round=region("round"),
            residual=region("residual"),
            norm_weight=self._places.tensor(norm),
            normed=region("normed"),
            taps=tap,
        )
        if unfinished is not None:
            params.partial, params.scale, params.bias = unfinished.partial, unfinished.scale, unfinished.bias
            params.unit = unfinished.unit
        return Launch(f"ull_norm_{self.tile}", *linear.norm(self.tile), params)

    def summed(self, kernel: str, weights: str, geometry: linear.Geometry, output: str) -> list[Launch]:
        """What turns a split layer's partial sums into its output; nothing where it is not split."""
        if not linear.is_split(self.tile):
            return []
        return [self._linear(f"{kernel}_sum", weights, geometry, "normed", output, None)]

    def plain(
        self, kernel: str, weights: str, geometry: linear.Geometry, activations: str, output: str = "residual"
    ) -> Launch:
        """A linear of what the kernel before it has written; o and down add to the residual."""
        return self._linear(kernel, weights, geometry, activations, output, None)

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
