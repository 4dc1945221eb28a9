"""What a GPU's f16 activations hold: found by the build, scaled exactly where an MLP needs it, else refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import Tensors, write_checkpoint
from device_bundles import write_stubs
from manifests import read_manifest_json, write_manifest_json
from ull.bundle import ActivationRange, Bundle, Precision, encode_manifest, open_bundle
from ull.commands import inspect
from ull.errors import BuildError, BundleError
from ull_build.build import build
from ull_build.code import kernels
from ull_build.progress import Reporter
from ull_build.quality.activation_range import F16_MAX, MARGIN, MOST_EXPONENT, check_activations
from ull_build.quality.evaluate import EvaluationText, Observation
from ull_build.settings import Settings
from ull_build.weights.mlp_scale import scale_rows_of

DIMENSIONS = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 112, "num_attention_heads": 4, "vocab_size": 333}
TEXT = EvaluationText("a text", np.zeros(64, np.int32), 64)
MLP_MAX = F16_MAX * 16


class Notes(Reporter):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "SOURCES", write_stubs(tmp_path / "kernels"))


def built(folder: Path, name: str, reporter: Reporter | None = None, **changes: Any) -> Bundle:
    """A bundle of the checkpoint `folder`."""
    options = {"target": "sm_90a", "eval_tokens": 64, "calibration_tokens": 64, "max_perplexity_increase": 10.0}
    return open_bundle(build(Settings(folder, folder.parent / name, "x", **(options | changes)), reporter).path)


def observation(**largest: float) -> Observation:
    """Of a model of two layers with two KV heads, in which everything is at most 1 but what is named."""
    inputs = {f"layers.{layer}.{linear}": 1.0 for layer in (0, 1) for linear in ("qkv", "o", "gate_up", "down")}
    caches = {f"layers.{layer}.kv": np.ones(4, np.float32) for layer in (0, 1)}
    for name, value in largest.items():
        place = name.replace("__", ".")
        if place.endswith((".keys", ".values")):
            caches[place.rpartition(".")[0] + ".kv"][1 if place.endswith(".keys") else 2] = value
        else:
            inputs[place] = value
    return Observation({}, {"lm_head": 1.0} | inputs, caches)


def louder(exponent: int) -> Callable[[Tensors], None]:
    """Multiplies layer 1's up projection by a power of two, and divides down by it: the same function."""

    def change(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] *= np.float32(2.0**exponent)
        tensors["model.layers.1.mlp.down_proj.weight"] *= np.float32(2.0**-exponent)
        if "model.layers.1.mlp.up_proj.bias" in tensors:
            tensors["model.layers.1.mlp.up_proj.bias"] *= np.float32(2.0**exponent)

    return change


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
@pytest.mark.parametrize("config", [{}, {"mlp_bias": True}], ids=["plain", "biases"])
def test_an_mlp_that_would_saturate_is_scaled_exactly(
    tmp_path: Path, weights: Any, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte the weights of a checkpoint whose up projection is smaller by the scale, and which fits."""
    notes, precision = Notes(), Precision(weights=weights)
    folder = write_checkpoint(tmp_path / "loud", config=DIMENSIONS | config, tensors=louder(24))
    loud = built(folder, "loud.ull", notes, precision=precision)
    found = loud.manifest.activations
    assert found is not None and list(found.scaled) == ["layers.1.down"]
    exponent = found.scaled["layers.1.down"]
    assert 1 < exponent < 24
    assert any("layers.1: MLP outputs" in note and f"2^{exponent}" in note for note in notes.notes)

    folder = write_checkpoint(tmp_path / "quiet", config=DIMENSIONS | config, tensors=louder(24 - exponent))
    quiet = built(folder, "quiet.ull", precision=precision)
    assert quiet.manifest.activations is not None and quiet.manifest.activations.scaled == {}
    assert quiet.manifest.activations.largest_share == pytest.approx(found.largest_share, rel=1e-3)
    assert loud.weights_path.read_bytes() == quiet.weights_path.read_bytes()
    unchecked = built(tmp_path / "loud", "unchecked.ull", precision=precision, evaluate=False)
    assert loud.weights_path.read_bytes() != unchecked.weights_path.read_bytes()

    assert inspect.main(loud.path) == 0
    assert f"layers.1.down by 2^-{exponent}" in " ".join(capsys.readouterr().out.split())


def test_what_is_not_scaled_is_as_before(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", config=DIMENSIONS)
    checked, unchecked = built(folder, "x.ull"), built(folder, "y.ull", evaluate=False)
    found = checked.manifest.activations
    assert found is not None and found.scaled == {} and 0 < found.largest_share < 0.01
    assert (found.text, found.tokens) == ("ull-build's default calibration text", 256)
    assert checked.weights_path.read_bytes() == unchecked.weights_path.read_bytes()


def test_the_manifest_says_where_nothing_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, notes = write_checkpoint(tmp_path / "m", config=DIMENSIONS), Notes()
    bundle = built(folder, "x.ull", notes, evaluate=False)
    assert bundle.manifest.activations is None
    assert any("not checked whether f16 holds the activations" in note and "--no-eval" in note for note in notes.notes)
    assert inspect.main(bundle.path) == 0
    assert "not checked whether f16 holds them" in capsys.readouterr().out
    assert not any("FP8 pages" in note for note in notes.notes)
    for target in ("sm_90a", "cpu"):
        pages = Notes()
        built(folder, f"pages-{target}.ull", pages, evaluate=False, target=target, precision=Precision(kv="fp8"))
        assert any("scales of FP8 pages are not measured" in note and "--no-eval" in note for note in pages.notes)
    host = built(folder, "host.ull", notes, target="cpu")
    assert host.manifest.activations is None and "activations" not in encode_manifest(host.manifest).decode()
    capsys.readouterr()
    assert inspect.main(host.path) == 0
    assert "activations" not in capsys.readouterr().out


def test_values_that_would_saturate_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    """The attention's values and outputs of layer 0 times 2^18; the CPU takes them."""

    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight"] *= np.float32(2.0**18)
        tensors["model.layers.0.self_attn.o_proj.weight"] *= np.float32(2.0**-18)

    folder = write_checkpoint(tmp_path / "m", config=DIMENSIONS, tensors=change)
    with pytest.raises(BuildError, match=r"layers\.0: attention .* holds.* use target \"cpu\"") as caught:
        built(folder, "x.ull")
    assert caught.value.field == "target" and "\n" not in str(caught.value)
    assert not (tmp_path / "x.ull").exists()
    assert built(folder, "host.ull", target="cpu").manifest.quality is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers__1__qkv", "layers.1: attention norm outputs"),
        ("layers__1__o", "layers.1: attention outputs"),
        ("layers__0__gate_up", "layers.0: MLP norm outputs"),
        ("layers__1__keys", "layers.1: attention keys"),
        ("layers__0__values", "layers.0: attention values"),
        ("lm_head", "final norm outputs"),
    ],
)
def test_limits_and_their_margin(name: str, words: str) -> None:
    """Up to f16's largest value everything goes, with a warning beyond a quarter of it."""
    for value, warned in ((F16_MAX / MARGIN, 0), (F16_MAX / MARGIN + 1, 1), (F16_MAX, 1)):
        notes = Notes()
        found = check_activations(observation(**{name: value}), TEXT, notes)
        assert found == ActivationRange("a text", 64, value / F16_MAX, name.replace("__", "."), {})
        assert len(notes.notes) == warned
        assert not warned or (words in notes.notes[0] and notes.notes[0].startswith("warning: "))
    with pytest.raises(BuildError, match=r"65504") as caught:
        check_activations(observation(**{name: F16_MAX + 1}), TEXT, Notes())
    assert words in str(caught.value) and 'target "cpu"' in str(caught.value)


def test_an_mlp_is_scaled_by_the_least_power_that_leaves_the_margin() -> None:
    for value, exponent in ((MLP_MAX / MARGIN, 0), (MLP_MAX / MARGIN * 1.01, 1), (MLP_MAX, 2), (MLP_MAX * 64.5, 9)):
        found = check_activations(observation(layers__1__down=value), TEXT, Notes())
        assert found.scaled == ({"layers.1.down": exponent} if exponent else {})
        assert found.largest_share <= 1 / MARGIN
    largest = MLP_MAX * 2.0**MOST_EXPONENT
    notes = Notes()
    assert check_activations(observation(layers__0__down=largest), TEXT, notes).largest_share == 1.0
    assert any(note.startswith("warning: layers.0: MLP outputs") for note in notes.notes)
    with pytest.raises(BuildError, match=r"layers\.0: MLP outputs"):
        check_activations(observation(layers__0__down=largest * 1.01), TEXT, Notes())


def test_only_up_and_down_of_that_layer_are_scaled() -> None:
    values, scaled = np.linspace(1, 2, 64, dtype=np.float32), {"layers.3.down": 5}
    for name in ("layers.3.gate_up.scale", "layers.3.gate_up.bias"):
        rows = scale_rows_of(name, values, scaled).reshape(4, 2, 8)
        np.testing.assert_array_equal(rows[:, 0], values.reshape(4, 2, 8)[:, 0])
        np.testing.assert_array_equal(rows[:, 1] * 32, values.reshape(4, 2, 8)[:, 1])
    np.testing.assert_array_equal(scale_rows_of("layers.3.down.scale", values, scaled), values * 32)
    for name in ("layers.3.down.bias", "layers.3.qkv.scale", "layers.2.down.scale", "layers.13.gate_up.scale", "norm"):
        assert scale_rows_of(name, values, scaled) is values


def test_damaged_accounts_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", config=DIMENSIONS)
    bundle = built(folder, "x.ull")
    manifest = read_manifest_json(bundle.path)
    for name, value in (("largest_share", 1.5), ("tokens", 0), ("scaled", {"layers.0.down": 0})):
        broken = manifest | {"activations": manifest["activations"] | {name: value}}
        write_manifest_json(bundle.path, broken)
        with pytest.raises(BundleError, match=name):
            open_bundle(bundle.path)
