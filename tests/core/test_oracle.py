"""The cpu executor against transformers' logits and tokens, on the committed fixtures (see tests/oracle).

Needs no PyTorch: `tests/oracle/make_fixtures.py` asked transformers once, and `make oracle` asks it again.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.cases import CASES, CHAT, CONFIGS, CONTEXT, GREEDY_TOKENS, TOLERANCE, Case, assemble, assemble_tokenizer
from ull._native import CpuModel, evaluate
from ull.bundle import Bundle, Precision, attention_factor, inverse_frequencies, open_bundle
from ull.errors import CheckpointError, RequestError
from ull.text.tokenizer import Tokenizer
from ull.wire import Message
from ull_build.build import build
from ull_build.settings import Settings
from ull_build.source.architecture import parse_config
from ull_build.weights.pack_cpu import ORIGINAL_BF16, ORIGINAL_F32

# Far inside the tolerance: a wrong option is off by more than 2e-2, float32 rounding by about 2e-6 (the fixtures
# themselves differ that much from a float64 computation).
EXPECTED_ERROR = 2e-5
# The first two keep the KV cache in f32. The third is what users get: fp8 linears, bf16 head, bf16 KV cache.
PRECISIONS = {"bf16": ORIGINAL_BF16, "f32": ORIGINAL_F32, "fp8": Precision()}


@dataclass(frozen=True)
class Engine:
    """A bundle built from a case's checkpoint, and what transformers expects of it (make_fixtures.py)."""

    case: Case
    bundle: Bundle
    expected: dict[str, np.ndarray]

    def model(self, **options: Any) -> CpuModel:
        return CpuModel(self.bundle.native_spec(), **options)

    @property
    def prompt(self) -> np.ndarray:
        return self.expected["prompt"]

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and greedy tokens, int32 [P + 64]."""
        return np.concatenate([self.expected["prompt"], self.expected["greedy"]])


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(case_name: str, precision: str) -> Engine:
        case = next(case for case in CASES if case.name == case_name)
        directory = tmp_path_factory.mktemp(f"{case_name}-{precision}")
        checkpoint = assemble(case, directory / "checkpoint")
        settings = Settings(
            model=checkpoint,
            output=directory / f"{case_name}.ull",
            name=case_name,
            precision=PRECISIONS[precision],
            evaluate=False,
        )
        bundle = open_bundle(build(settings).path, verify="hashes")
        with np.load(case.directory / "expected.npz") as arrays:
            return Engine(case, bundle, dict(arrays))

    return make


# A bf16 bundle holds these checkpoints without loss; f32 holds all of them.
EXACT = [(case.name, "bf16") for case in CASES if case.exact_in_bf16] + [(case.name, "f32") for case in CASES]
QUANTISED = [(case.name, "fp8") for case in CASES]


def combination_name(pair: tuple[str, str]) -> str:
    return "-".join(pair)


@pytest.fixture(params=EXACT, ids=combination_name)
def exact_engine(request: pytest.FixtureRequest, make_engine: Any) -> Engine:
    """Every case without loss: comparable with transformers."""
    return make_engine(*request.param)


@pytest.fixture(params=EXACT + QUANTISED, ids=combination_name)
def engine(request: pytest.FixtureRequest, make_engine: Any) -> Engine:
    """Every case in every precision: for what must hold bit for bit."""
    return make_engine(*request.param)


def relative_error(logits: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(logits - reference).max() / np.abs(reference).max())


def test_every_architecture_and_option_has_a_case() -> None:
    configs = [case.config for case in CASES]
    assert {config["model_type"] for config in configs} == {"llama", "mistral", "qwen2", "qwen3"}
    assert {case.dtype for case in CASES} == {"bfloat16", "float16", "float32"}
    assert {config["rope_parameters"]["rope_type"] for config in configs} == {"default", "linear", "llama3", "yarn"}
    for kind in ("llama", "qwen2", "qwen3"):
        assert {c["tie_word_embeddings"] for c in configs if c["model_type"] == kind} == {True, False}, kind
    for kind in ("mistral", "qwen2", "qwen3"):
        assert {bool(c.get("sliding_window")) for c in configs if c["model_type"] == kind} == {True, False}, kind
    assert {case.classic for case in CASES} == {True, False}
    assert any(list(case.directory.glob("*.index.json")) for case in CASES), "no sharded checkpoint"


def test_logits_agree_with_transformers(exact_engine: Engine) -> None:
    logits = exact_engine.model().logits(exact_engine.tokens)
    assert logits.shape == (len(exact_engine.tokens), exact_engine.case.config["vocab_size"])
    error = relative_error(logits[exact_engine.expected["positions"]], exact_engine.expected["logits"])
    assert error <= TOLERANCE
    assert error <= EXPECTED_ERROR


def test_greedy_tokens_equal_transformers(exact_engine: Engine) -> None:
    assert exact_engine.expected["margin"] >= 10 * TOLERANCE, "this fixture cannot decide: regenerate it"
    assert len(exact_engine.expected["greedy"]) == GREEDY_TOKENS
    generated = exact_engine.model().generate_greedy(exact_engine.prompt, GREEDY_TOKENS)
    assert generated.tolist() == exact_engine.expected["greedy"].tolist()


def test_chunked_prefill_is_bit_identical(engine: Engine) -> None:
    model = engine.model()
    whole = model.logits(engine.tokens, chunk=CONTEXT)
    for chunk in (1, 7, 32, 64, 100):
        np.testing.assert_array_equal(model.logits(engine.tokens, chunk=chunk), whole, err_msg=f"chunk {chunk}")


def test_permuted_pages_are_bit_identical(engine: Engine) -> None:
    model = engine.model(pages=8)
    in_order = model.logits(engine.tokens)
    for pages in ([7, 0, 5, 2], [3, 2, 1, 0]):
        permuted = model.logits(engine.tokens, chunk=50, pages=np.array(pages, np.int32))
        np.testing.assert_array_equal(permuted, in_order, err_msg=f"pages {pages}")


def test_decoding_is_bit_identical_to_prefill(engine: Engine) -> None:
    model = engine.model()
    whole = model.logits(engine.tokens)
    length = len(engine.prompt)
    model.prefill(engine.prompt, 64)
    for position in range(length, len(engine.tokens)):
        logits = model.decode(int(engine.tokens[position]), position)
        np.testing.assert_array_equal(np.ravel(logits), whole[position], err_msg=f"position {position}")


@pytest.mark.parametrize("case", [case for case in CASES if case.exact_in_bf16], ids=lambda case: case.name)
def test_bf16_and_f32_bundles_are_bit_identical(case: Case, make_engine: Any) -> None:
    bf16, f32 = make_engine(case.name, "bf16"), make_engine(case.name, "f32")
    np.testing.assert_array_equal(bf16.model().logits(bf16.tokens), f32.model().logits(f32.tokens))


def test_instruction_sets_and_threads_are_bit_identical(engine: Engine) -> None:
    best = engine.model()
    expected = best.logits(engine.tokens)
    for isa in {"avx512": ["avx2", "portable"], "avx2": ["portable"], "portable": []}[best.isa]:
        np.testing.assert_array_equal(engine.model(isa=isa).logits(engine.tokens), expected, err_msg=isa)
    np.testing.assert_array_equal(engine.model(threads=2).logits(engine.tokens), expected, err_msg="2 threads")


@pytest.mark.parametrize("name", ["llama", "llama-bias", "mistral-window", "qwen2-window", "qwen3-window-bias"])
def test_layerwise_evaluation_agrees_with_the_model(name: str, make_engine: Any) -> None:
    engine = make_engine(name, "bf16")
    window = 100
    tokens = engine.tokens[: 2 * window]
    nll, argmax = evaluate(engine.bundle.native_spec(), tokens, window, 1, None)
    for index in range(2):
        part = tokens[index * window : (index + 1) * window]
        logits = engine.model().logits(part)[:-1].astype(np.float64)
        expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(window - 1), part[1:]]
        place = slice(index * (window - 1), (index + 1) * (window - 1))
        np.testing.assert_allclose(nll[place], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(argmax[place], logits.argmax(-1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_special_tokens_reach_the_manifest(case: Case, make_engine: Any) -> None:
    tokens = make_engine(case.name, "fp8").bundle.manifest.tokens
    assert tokens.bos == case.config["bos_token_id"]
    assert sorted(tokens.eos) == sorted(case.eos)
    assert tokens.chat_template


READINGS = json.loads(CONFIGS.read_text(encoding="utf-8"))
SEEN_TOKENS = 12  # configs.LENGTH
# What transformers computes and we refuse: the maths is not ours, or the file says what transformers passes over.
REFUSED = {
    "rope_scaling.rope_type": "dynamic",
    "rope_parameters.rope_type": "dynamic",
    "rope_scaling": "nested",
    "rope_parameters": "nested",
    "layer_types": "llama",
}
# Here transformers fails: it prepares the sliding mask of a Mistral with layer types also where no layer slides.
FULL_ATTENTION = {
    f"mistral {window} {types}" for window in ("null-window", "used-null") for types in ("+null", "+full", "+old-name")
}


@pytest.mark.parametrize("entry", READINGS["entries"], ids=lambda entry: entry["name"])
def test_configurations_are_read_as_in_transformers(entry: dict[str, Any]) -> None:
    config = READINGS["base"] | entry["config"]
    if entry["name"] in FULL_ATTENTION:
        assert parse_config(config, {}).model.windows == [0, 0]
        return
    if "error" in entry:
        with pytest.raises(CheckpointError):
            parse_config(config, {})
        return
    try:
        model = parse_config(config, {}).model
    except CheckpointError as error:
        assert error.field is not None and REFUSED[error.field] in entry["name"].split(), error.message
        return
    frequencies = inverse_frequencies(model.rope, model.head_dim)
    np.testing.assert_allclose(frequencies, entry["inverse_frequencies"], rtol=3e-7)
    assert attention_factor(model.rope) == pytest.approx(entry["attention_factor"], rel=1e-9)
    assert [min(window or SEEN_TOKENS, SEEN_TOKENS) for window in model.windows] == entry["seen"]


CHAT_ENTRIES = json.loads(CHAT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", CHAT_ENTRIES, ids=lambda entry: entry["name"])
def test_chat_templates_render_as_in_transformers(entry: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = Tokenizer(assemble_tokenizer(entry, tmp_path / "tokenizer"))
    for conversation in entry["conversations"]:
        messages = [Message(**message) for message in conversation["messages"]]
        if "error" in conversation:
            with pytest.raises(RequestError) as caught:
                tokenizer.render(messages)
            assert conversation["error"] in caught.value.message
            continue
        chat = tokenizer.render(messages, special_tokens=True)
        assert chat.text == conversation["text"]
        assert tokenizer.encode_chat(chat) == conversation["ids"]


@pytest.mark.parametrize("entry", CHAT_ENTRIES, ids=lambda entry: entry["name"])
def test_prompts_encode_as_in_transformers(entry: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = Tokenizer(assemble_tokenizer(entry, tmp_path / "tokenizer"))
    for prompt in entry["prompts"]:
        assert tokenizer.encode(prompt["text"], special_tokens=True) == prompt["ids"], prompt["text"]
