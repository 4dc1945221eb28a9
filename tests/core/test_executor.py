"""The cpu executor against a float64 reference, and itself: same bits for any chunk, pages, threads and isa."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packing import Dims, RandomModel, llama3_frequencies
from ull import _native

LENGTH = 150  # tokens: three pages, the last one part full

CASES = {
    "llama": Dims(),
    "llama-bf16": Dims(weights="bf16", lm_head="bf16", head_dim=32),
    "llama-fp8": Dims(weights="fp8", lm_head="bf16", hidden=96, intermediate=160),
    "fp8-head": Dims(weights="fp8", lm_head="fp8", embedding="bf16"),
    "fp8-untied": Dims(weights="fp8", lm_head="bf16", embedding="bf16", tied=False, vocabulary=131),
    "llama3-rope": Dims(inv_freq=llama3_frequencies(16, 10000.0, 8.0, 1.0, 4.0, 64), tied=False),
    "yarn-rope": Dims(attention_factor=1.35, tied=False),
    "linear-rope": Dims(inv_freq=(1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16) / 4).astype(np.float32)),
    "mistral": Dims(windows=(40, 40, 40), layers=3, heads=6, kv_heads=3),
    "short-windows": Dims(windows=(1, 3), heads=3, kv_heads=1, head_dim=20),
    "window-of-pages": Dims(windows=(64, 0, 128), layers=3),
    "qwen2": Dims(bias=True, weights="bf16", lm_head="bf16", heads=7, kv_heads=1, head_dim=16),
    "qwen2-fp8": Dims(bias=True, weights="fp8", lm_head="bf16", windows=(0, 33)),
    "qwen3": Dims(qk_norm=True, head_dim=40, heads=4, kv_heads=4),
    "qwen3-fp8": Dims(qk_norm=True, weights="fp8", lm_head="bf16", head_dim=128, heads=2, kv_heads=1),
    "odd-sizes": Dims(hidden=50, heads=5, kv_heads=5, head_dim=10, intermediate=37, vocabulary=33, bias=True),
    "wide-group": Dims(heads=26, kv_heads=2, head_dim=8, hidden=40),
    "head-80": Dims(head_dim=80, heads=2, kv_heads=2, hidden=72),
    "deep-blocks": Dims(hidden=300, intermediate=520, layers=1, weights="fp8", lm_head="bf16"),
    "sharp-attention": Dims(spread=6.0, layers=1),
}


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RandomModel, dict[str, Any]]:
    model = RandomModel(dataclasses.replace(CASES[request.param]))
    return model, model.save(tmp_path_factory.mktemp("weights") / "weights.safetensors")


def small(tmp_path: Path, **dims: Any) -> dict[str, Any]:
    return RandomModel(Dims(**dims)).save(tmp_path / "weights.safetensors")


def random_tokens(count: int, vocabulary: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


def available_isas() -> list[str]:
    isas = ["portable"]
    for isa in ("avx2", "avx512"):
        try:
            _native.sample(np.zeros(1, np.float32), 0, {"isa": isa})
        except ValueError:
            continue
        isas.append(isa)
    return isas


def test_logits_agree_with_the_reference(case: tuple[RandomModel, dict[str, Any]]) -> None:
    model, spec = case
    tokens = random_tokens(LENGTH, model.dims.vocabulary)
    expected = model.reference(tokens)
    logits = _native.CpuModel(spec).logits(tokens)
    assert logits.dtype == np.float32 and logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("kv", ["f32", "bf16", "fp8"])
def test_bits_depend_on_nothing_but_the_model(
    case: tuple[RandomModel, dict[str, Any]], kv: str, tmp_path: Path
) -> None:
    model, spec = case
    if kv == "fp8":
        model = RandomModel(dataclasses.replace(model.dims, kv=kv))
        spec = model.save(tmp_path / "w.safetensors")
    spec = spec | {"kv_dtype": kv}
    tokens = random_tokens(LENGTH, model.dims.vocabulary)
    expected = _native.CpuModel(spec, isa="portable").logits(tokens, chunk=256)
    pages = np.random.default_rng(3).permutation(5).astype(np.int32)
    for isa in available_isas():
        for threads in (1, 2, 3):
            executor = _native.CpuModel(spec, isa=isa, threads=threads)
            assert executor.isa == isa
            for chunk in (1, 7, 64, 256) if threads == 1 else (7, 256):
                np.testing.assert_array_equal(executor.logits(tokens, chunk=chunk), expected)
            np.testing.assert_array_equal(executor.logits(tokens, chunk=64, pages=pages), expected)
            executor.prefill(tokens[:90], chunk=64)
            for position in range(90, 100):
                np.testing.assert_array_equal(executor.decode(int(tokens[position]), position), expected[position])


def test_kv_in_bf16_agrees_with_the_reference(tmp_path: Path) -> None:
    model = RandomModel(Dims(kv="bf16", weights="bf16", lm_head="bf16"))
    tokens = random_tokens(LENGTH, model.dims.vocabulary)
    expected = model.reference(tokens)
    logits = _native.CpuModel(model.save(tmp_path / "w.safetensors")).logits(tokens)
    # A key whose float32 and float64 values round to different bf16 neighbours moves the logits a little.
    assert np.abs(logits - expected).max() <= 3e-3 * np.abs(expected).max()


@pytest.mark.parametrize("dims", [{}, {"qk_norm": True, "head_dim": 40, "bias": True, "windows": (0, 70)}])
def test_kv_in_fp8_agrees_with_the_reference(tmp_path: Path, dims: dict[str, Any]) -> None:
    """Rounded as a GPU's FP8 pages hold them, in the unit of each head; what is beyond 448 of it saturates."""
    model = RandomModel(Dims(kv="fp8", weights="bf16", lm_head="bf16", **dims))
    tokens = random_tokens(LENGTH, model.dims.vocabulary)
    saturated = {"keys": 0, "values": 0}

    def look(name: str, x: np.ndarray) -> np.ndarray:
        layer, _, kind = name.rpartition(".")
        if kind in saturated:
            scales = model.layers[int(layer.removeprefix("layers."))].kv_scale
            assert scales is not None
            limits = 448 * scales[list(saturated).index(kind)]
            saturated[kind] += int((np.abs(x) > limits[:, None]).sum())
        return x

    expected = model.reference(tokens, look)
    spec = model.save(tmp_path / "w.safetensors")
    logits = _native.CpuModel(spec).logits(tokens)
    # A key whose float32 and float64 values round to different neighbours moves the logits more than in bf16.
    assert np.abs(logits - expected).max() <= 3e-2 * np.abs(expected).max()
    assert np.median(np.abs(logits - expected)) <= 1e-3 * np.abs(expected).max()
    exact = _native.CpuModel(spec | {"kv_dtype": "f32"}).logits(tokens)
    assert min(saturated.values()) > 0 and np.abs(exact - expected).max() > 0.1 * np.abs(expected).max()


def test_the_units_of_fp8_pages_are_powers_of_two(tmp_path: Path) -> None:
    model = RandomModel(Dims(kv="fp8"))
    whole = model.save(tmp_path / "w.safetensors")
    for wrong in (3.0, 0.0, -1.0, float("nan"), float("inf")):
        model.tensors["layers.1.kv_scale"][3] = wrong
        with pytest.raises(ValueError, match=r"layers\.1\.kv_scale: .* at 3 is not a power of two"):
            _native.CpuModel(model.save(tmp_path / "wrong.safetensors"))
    del whole["tensors"]["layers.0.kv_scale"]
    with pytest.raises(ValueError, match=r"layers\.0\.kv_scale"):
        _native.CpuModel(whole)


def test_a_sequence_forgets_the_one_before(tmp_path: Path) -> None:
    spec = small(tmp_path)
    executor = _native.CpuModel(spec)
    first, second = random_tokens(200, 100, 1), random_tokens(30, 100, 2)
    expected = _native.CpuModel(spec).logits(second)
    executor.logits(first)
    np.testing.assert_array_equal(executor.logits(second), expected)


def test_greedy_generation_is_argmax_of_the_logits(tmp_path: Path) -> None:
    executor = _native.CpuModel(small(tmp_path, weights="fp8", lm_head="bf16", kv="bf16"), threads=2)
    prompt = random_tokens(11, 100)
    generated = executor.generate_greedy(prompt, 30)
    logits = executor.logits(np.concatenate([prompt, generated[:-1]]))
    np.testing.assert_array_equal(generated, logits[len(prompt) - 1 :].argmax(axis=1))


def test_a_full_context_fits_and_one_more_does_not(tmp_path: Path) -> None:
    spec = small(tmp_path, context=130)
    executor = _native.CpuModel(spec)
    tokens = random_tokens(131, 100)
    assert executor.logits(tokens[:130]).shape == (130, 100)
    with pytest.raises(ValueError, match="131 positions, but the context holds 130"):
        executor.logits(tokens)
    with pytest.raises(ValueError, match="context"):
        executor.generate_greedy(tokens[:130], 2)
    assert len(executor.generate_greedy(tokens[:130], 1)) == 1
    with pytest.raises(ValueError, match="context"):
        executor.decode(0, 130)


def test_sizes_are_reported(tmp_path: Path) -> None:
    executor = _native.CpuModel(small(tmp_path, kv="bf16", head_dim=16), pages=3)
    assert (
        executor.kv_bytes == 3 * 2 * 2 * 64 * (16 + 32) * 2
    )  # pages, layers, heads, tokens, key + padded value, bytes
    assert executor.weight_bytes > 0


# ---- what must be refused ----------------------------------------------------------------------------------------


def altered(spec: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    entry = dict(zip(("offset", "nbytes", "dtype", "shape"), spec["tensors"][name], strict=True)) | changes
    return spec | {"tensors": spec["tensors"] | {name: tuple(entry.values())}}


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    spec = small(tmp_path, weights="fp8", lm_head="bf16", qk_norm=True)
    for name in spec["tensors"]:
        without = {key: value for key, value in spec["tensors"].items() if key != name}
        with pytest.raises(ValueError, match=rf"tensor {name}: missing"):
            _native.CpuModel(spec | {"tensors": without})
    name = "layers.1.down.weight"
    with pytest.raises(ValueError, match=rf"{name}: shape \[2, 95, 32\], expected \[2, 96, 32\]"):
        _native.CpuModel(altered(spec, name, shape=(2, 95, 32), nbytes=2 * 95 * 32))
    with pytest.raises(ValueError, match=rf"{name}: 100 bytes do not fit"):
        _native.CpuModel(altered(spec, name, nbytes=100))
    with pytest.raises(ValueError, match=rf"{name}: offset 3 "):
        _native.CpuModel(altered(spec, name, offset=3))
    with pytest.raises(ValueError, match=rf'{name}: dtype "I8" is unknown'):
        _native.CpuModel(altered(spec, name, dtype="I8"))
    with pytest.raises(ValueError, match=rf"{name}: .*truncated"):
        _native.CpuModel(altered(spec, name, offset=1 << 40))
    with pytest.raises(ValueError, match=r"norm: dtype F8_E4M3 is not supported"):
        _native.CpuModel(altered(spec, "norm", dtype="F8_E4M3", nbytes=64))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", 0),
        ("hidden", 1 << 30),
        ("layers", -1),
        ("heads", 3),
        ("kv_heads", 0),
        ("head_dim", 15),
        ("intermediate", 0),
        ("vocabulary", 0),
        ("context", 0),
        ("rms_epsilon", float("nan")),
        ("kv_dtype", "fp4"),
        ("inv_freq", np.ones(7, np.float32)),
        ("attention_factor", 0.0),
        ("attention_factor", float("inf")),
        ("windows", [0]),
        ("windows", [0, -1]),
        ("path", "/nowhere/weights.safetensors"),
        ("hidden", "many"),
    ],
)
def test_bad_fields_are_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        _native.CpuModel(small(tmp_path) | {field: value})


def test_missing_fields_are_named(tmp_path: Path) -> None:
    spec = small(tmp_path)
    for name in spec:
        with pytest.raises(ValueError, match=f"{name}: missing"):
            _native.CpuModel({key: value for key, value in spec.items() if key != name})


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    spec = small(tmp_path)
    data = Path(spec["path"]).read_bytes()
    Path(spec["path"]).write_bytes(data[: len(data) // 2])
    for run in (_native.CpuModel, lambda s: _native.evaluate(s, np.zeros(4, np.int32), 4)):
        with pytest.raises(ValueError, match="truncated"):
            run(spec)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    spec = small(tmp_path)
    for arguments in ({"isa": "mmx"}, {"threads": 0}, {"threads": 2, "cores": [0]}, {"pages": 0}, {"max_chunk": 0}):
        with pytest.raises(ValueError, match=next(reversed(arguments)).removeprefix("max_")):
            _native.CpuModel(spec, **arguments)
    executor = _native.CpuModel(spec)
    tokens = random_tokens(100, 100)
    for bad in (np.array([100], np.int32), np.array([-1], np.int32)):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            executor.logits(bad)
    with pytest.raises(ValueError, match="at least one"):
        executor.logits(np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="chunk: must be 1 to 256"):
        executor.logits(tokens, chunk=257)
    for pages in ([0, 0], [0, 5], [-1, 1]):
        with pytest.raises(ValueError, match="distinct"):
            executor.logits(tokens, pages=np.array(pages, np.int32))
    with pytest.raises(ValueError, match="1 pages cannot hold 100 tokens"):
        executor.logits(tokens, pages=np.array([2], np.int32))


@pytest.mark.parametrize("name", ["layers.0.qkv.weight", "layers.1.down.weight", "layers.1.mlp_norm", "lm_head.weight"])
def test_nan_weights_never_yield_a_token(tmp_path: Path, name: str) -> None:
    model = RandomModel(Dims(weights="bf16", lm_head="bf16", tied=False))
    model.tensors[name].reshape(-1)[0] = np.nan
    executor = _native.CpuModel(model.save(tmp_path / "w.safetensors"))
    with pytest.raises(RuntimeError, match="not finite"):
        executor.generate_greedy(random_tokens(3, 100), 4)


def test_nan_in_fp8_weights_is_refused(tmp_path: Path) -> None:
    model = RandomModel(Dims(weights="fp8", lm_head="bf16"))
    model.tensors["layers.1.o.weight"].view(np.uint8).reshape(-1)[5] = 0xFF
    with pytest.raises(ValueError, match=r"tensor layers\.1\.o\.weight: holds NaN"):
        _native.CpuModel(model.save(tmp_path / "w.safetensors"))


# ---- the sampler -------------------------------------------------------------------------------------------------


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, from the paper."""
    c, k, mask = list(counter), list(key), 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & mask, (p0 >> 32) ^ c[3] ^ k[1], p0 & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def test_philox_is_the_published_generator() -> None:
    """Known answers of Random123's kat_vectors."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_gumbel_noise_follows_the_definition() -> None:
    tokens = np.array([0, 1, 2, 3, 4, 77, 4095, 127_999], np.int32)
    for seed, position in ((0, 0), (1, 5), (0xDEADBEEF_12345678, 100_000)):
        noise = _native.gumbel(seed, position, tokens)
        for token, value in zip(tokens.tolist(), noise.tolist(), strict=True):
            word = philox([token >> 2, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])[token & 3]
            uniform = ((word >> 9) + 0.5) * 2.0**-23
            assert value == pytest.approx(-np.log(-np.log(uniform)), rel=1e-6, abs=1e-6)


def filtered_distribution(logits: np.ndarray, sampling: dict[str, Any]) -> np.ndarray:
    """The analytic distribution of the sampling rule."""
    adjusted = logits.astype(np.float64)
    for token, bias in sampling.get("logit_bias", {}).items():
        adjusted[token] += bias
    adjusted = adjusted / sampling["temperature"]
    order = np.lexsort((np.arange(len(adjusted)), -adjusted))
    keep = order[: sampling["top_k"]] if sampling.get("top_k") else order
    mass = np.exp(adjusted[keep] - adjusted.max())
    cumulative = np.cumsum(mass) / mass.sum()
    if sampling.get("top_p", 1.0) < 1.0:
        keep = keep[: int((cumulative < sampling["top_p"]).sum()) + 1]
    probabilities = np.zeros(len(adjusted))
    probabilities[keep] = np.exp(adjusted[keep] - adjusted.max())
    probabilities[probabilities < sampling.get("min_p", 0.0)] = 0.0
    return probabilities / probabilities.sum()


def assert_follows(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square goodness of fit at p = 1e-4 (Wilson-Hilferty), cells of at least 5 expected draws."""
    draws = counts.sum()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * draws
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    if freedom == 0:
        return
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, (statistic, limit)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "top_k beyond the vocabulary": {"temperature": 1.0, "top_k": 10_000},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_p tiny": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "min_p of one": {"temperature": 1.0, "min_p": 1.0},
    "bias": {"temperature": 1.0, "logit_bias": {0: 2.0, 3: -float("inf"), 40: 1.5}},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "logit_bias": {7: 1.0}},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
@pytest.mark.parametrize("vocabulary", [64, 73])
def test_sampling_follows_the_distribution(sampling: dict[str, Any], vocabulary: int) -> None:
    logits = (np.random.default_rng(5).standard_normal(vocabulary) * 2).astype(np.float32)
    logits[11] = logits[12]  # a tie
    counts = np.zeros(vocabulary, np.int64)
    for draw in range(8000):
        # Half of the draws differ by position, half by seed.
        position, seed = (draw, 99) if draw % 2 else (17, draw * 0x1_0000_0001)
        counts[_native.sample(logits, position, sampling | {"seed": seed})] += 1
    assert_follows(counts, filtered_distribution(logits, sampling))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_sampling_is_argmax_of_adjusted_logits_plus_noise(sampling: dict[str, Any]) -> None:
    """The rule itself, token by token, on every instruction set and a large vocabulary."""
    vocabulary = 5003
    random = np.random.default_rng(9)
    for position in range(12):
        logits = (random.standard_normal(vocabulary) * 3).astype(np.float32)
        probabilities = filtered_distribution(logits, sampling)
        noise = _native.gumbel(123, position, np.arange(vocabulary, dtype=np.int32)).astype(np.float64)
        with np.errstate(divide="ignore"):
            scores = np.log(probabilities) + noise
        for isa in available_isas():
            assert _native.sample(logits, position, sampling | {"seed": 123, "isa": isa}) == scores.argmax()


def penalized(logits: np.ndarray, sampling: dict[str, Any], prompt: list[int], generated: list[int]) -> np.ndarray:
    """Repetition as transformers has it, frequency and presence as OpenAI's API documents them, in float32."""
    out = logits.astype(np.float32)
    repetition = np.float32(sampling.get("repetition_penalty", 1.0))
    frequency = np.float32(sampling.get("frequency_penalty", 0.0))
    presence = np.float32(sampling.get("presence_penalty", 0.0))
    for token in {*prompt, *generated}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(generated):
        out[token] = out[token] - frequency * np.float32(generated.count(token))
        out[token] = out[token] - presence
    return out


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition below one": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "negative": {"frequency_penalty": -0.4, "presence_penalty": -1.0},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.3},
}


@pytest.mark.parametrize("penalties", PENALTIES.values(), ids=list(PENALTIES))
@pytest.mark.parametrize("others", [{}, SAMPLINGS["plain"], SAMPLINGS["all"]], ids=["greedy", "plain", "all"])
def test_penalties_come_before_everything_else(penalties: dict[str, Any], others: dict[str, Any]) -> None:
    """Drawing with penalties is drawing from logits to which they have been applied."""
    random = np.random.default_rng(3)
    changed = 0
    for position in range(40):
        logits = (random.standard_normal(50) * 2).astype(np.float32)
        prompt, generated = (random.integers(0, 50, size).tolist() for size in (7, position))
        history = np.array([*prompt, *generated], np.int32)
        sampling = others | {"seed": 8}
        drawn = _native.sample(logits, position, sampling | penalties, history, len(prompt))
        wanted = penalized(logits, penalties, prompt, generated)
        assert drawn == _native.sample(wanted, position, sampling)
        assert _native.sample(logits, position, sampling | penalties) == _native.sample(logits, position, sampling)
        changed += drawn != _native.sample(logits, position, sampling)
    assert changed > 0


def test_greedy_takes_the_smaller_of_equal_tokens() -> None:
    logits = np.zeros(200, np.float32)
    logits[[70, 150, 199]] = 4.0
    for isa in available_isas():
        assert _native.sample(logits, 0, {"isa": isa}) == 70
        assert _native.sample(logits, 0, {"isa": isa, "logit_bias": {70: -1.0}}) == 150
        assert _native.sample(logits, 0, {"isa": isa, "logit_bias": {70: -np.inf, 3: 9.0}}) == 3
        assert _native.sample(logits, 0, {"isa": isa, "temperature": 1e-38, "seed": 4}) in (70, 150, 199)
        assert _native.sample(logits, 0, {"isa": isa, "temperature": 1.0, "top_k": 1, "seed": 4}) == 70


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 63, 64, 99])
def test_logits_that_are_not_finite_yield_no_token(value: float, index: int) -> None:
    logits = np.zeros(100, np.float32)
    logits[index] = value
    for isa in available_isas():
        for temperature in (0.0, 1.0):
            with pytest.raises(ValueError, match="not finite"):
                _native.sample(logits, 0, {"isa": isa, "temperature": temperature})


def test_a_vocabulary_that_is_banned_entirely_yields_no_token() -> None:
    banned = {token: -float("inf") for token in range(5)}
    for sampling in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}):
        with pytest.raises(ValueError, match="banned"):
            _native.sample(np.zeros(5, np.float32), 0, sampling | {"logit_bias": banned})
    with pytest.raises(ValueError):
        _native.sample(np.zeros(5, np.float32), 0, {"logit_bias": {5: 1.0}})
