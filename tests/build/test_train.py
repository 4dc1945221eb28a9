"""The trainers: data and figures without PyTorch, and a few steps of training where it is installed."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from checkpoints import TRAINING_TEXT, write_checkpoint
from ull import _native
from ull.bundle import Bundle, Precision, open_bundle
from ull.errors import BuildError
from ull_build.build import build
from ull_build.progress import Reporter
from ull_build.settings import Settings
from ull_build.source.checkpoint import Checkpoint
from ull_build.source.drafters import SpeculationSettings
from ull_build.source.vocabulary import read_tokenizer
from ull_build.train import cli
from ull_build.train.acceptance import describe, measure, ranks
from ull_build.train.data import (
    Plan,
    cut_prompts,
    encode_documents,
    fingerprint,
    generate,
    load_sequences,
    read_texts,
)
from ull_build.train.unpack import bundle_weights
from ull_build.weights.quantise import dequantise_rows, quantise_rows

PLAN = Plan(sequences=6, prompt_tokens=24, response_tokens=12)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("train")
    return open_bundle(build(Settings(write_checkpoint(folder / "model"), folder / "x.ull", "x", evaluate=False)).path)


@pytest.fixture(scope="module")
def documents(bundle: Bundle) -> list[list[int]]:
    tokenizer = read_tokenizer(bundle.tokenizer_directory, bundle.manifest.model.vocabulary)
    return encode_documents(TRAINING_TEXT, tokenizer)


# Without PyTorch


def test_outputs_are_the_targets_own(bundle: Bundle, documents: list[list[int]]) -> None:
    outputs = generate(bundle, documents, [0], PLAN, 1, Reporter())
    assert len(outputs) == 6 and outputs.responses == sum(np.diff(outputs.starts)) - outputs.prompts.sum()
    assert outputs.temperatures.tolist() == pytest.approx([0.0, 0.8, 1.0] * 2)
    model = _native.CpuModel(bundle.native_spec())
    for place in range(6):
        tokens, prompt = outputs.sequence(place), int(outputs.prompts[place])
        assert tokens[0] == 0 and prompt + 12 >= len(tokens) > prompt
        logits = np.asarray(model.logits(tokens))
        sampling = {"temperature": float(outputs.temperatures[place]), "seed": int(outputs.seeds[place])}
        drawn = [_native.sample(logits[position - 1], position, sampling) for position in range(prompt, len(tokens))]
        assert drawn == tokens[prompt:].tolist()


def test_prompts_come_from_the_documents(documents: list[list[int]]) -> None:
    prompts = list(cut_prompts(documents, [0], PLAN, 256))
    assert len(prompts) == 6
    for prompt in prompts:
        body = prompt[1:].tolist()
        assert prompt[0] == 0 and 16 <= len(body) <= 24
        assert any(body == ids[start : start + len(body)] for ids in documents for start in range(len(ids)))
    again = list(cut_prompts(documents, [0], PLAN, 256))
    assert all(np.array_equal(one, two) for one, two in zip(prompts, again, strict=True))
    with pytest.raises(BuildError, match="do not fit into the target's context of 24 tokens"):
        next(cut_prompts(documents, [0], PLAN, 24))


def test_stored_outputs_are_known_by_what_made_them(bundle: Bundle, documents: list[list[int]], tmp_path: Path) -> None:
    outputs = generate(bundle, documents, [0], PLAN, 1, Reporter())
    mark = fingerprint(bundle, PLAN, documents)
    outputs.save(tmp_path / "x.npz", mark)
    assert np.array_equal(load_sequences(tmp_path / "x.npz", mark).tokens, outputs.tokens)
    with pytest.raises(BuildError, match="another target, text or plan"):
        load_sequences(tmp_path / "x.npz", fingerprint(bundle, PLAN, documents[1:]))
    (tmp_path / "x.npz").write_bytes(b"damaged")
    with pytest.raises(BuildError, match="cannot be read as generated sequences"):
        load_sequences(tmp_path / "x.npz", mark)


def test_texts_that_are_missing_or_short_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("short")
    tokenizer = read_tokenizer(bundle.tokenizer_directory, bundle.manifest.model.vocabulary)
    assert read_texts([tmp_path / "texts"]) == ["short"]
    with pytest.raises(BuildError, match="no document of 16 tokens"):
        encode_documents(["short"], tokenizer)
    with pytest.raises(BuildError, match=r"none\.txt cannot be read"):
        read_texts([tmp_path / "none.txt"])
    (tmp_path / "texts/b.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BuildError, match=r"b\.bin cannot be read as UTF-8"):
        read_texts([tmp_path / "texts"])


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_a_bundle_gives_back_its_weights(tmp_path: Path, precision: str, architecture: str, tied: bool) -> None:
    directory = write_checkpoint(tmp_path / "model", architecture, tied=tied)
    stored = Precision(weights=precision)  # type: ignore[arg-type]
    settings = Settings(directory, tmp_path / "x.ull", "x", evaluate=False, precision=stored)
    weights = bundle_weights(open_bundle(build(settings).path))
    with Checkpoint(directory) as checkpoint:
        assert set(weights) == set(checkpoint.tensors)
        for name, found in weights.items():
            original = np.concatenate(list(checkpoint.blocks(name)))
            if precision == "fp8" and name.endswith("_proj.weight"):
                original = dequantise_rows(*quantise_rows(original))
            assert np.array_equal(found, original), name


def test_acceptance_is_what_the_rule_accepts(bundle: Bundle, documents: list[list[int]]) -> None:
    """The target as its own drafter is always right, at every temperature; a drafter of noise hardly ever."""
    outputs = generate(bundle, documents, [0], PLAN, 1, Reporter())
    model = _native.CpuModel(bundle.native_spec())
    depths = 3

    def own(place: int, first: int, last: int) -> np.ndarray:
        logits = np.asarray(model.logits(outputs.sequence(place)))
        return np.stack([logits[first + depth : last + depth] for depth in range(depths)], axis=1)

    for result in measure(outputs, own, depths, first_ahead=1):
        assert [depth[0] for depth in result.hits] == [1.0] * depths
        assert 3.0 < result.chain <= depths + 1

    def noise(place: int, first: int, last: int) -> np.ndarray:
        return np.random.default_rng(place).standard_normal((last - first, depths, 330)).astype(np.float32) * 30

    results = measure(outputs, noise, depths, first_ahead=1)
    assert [result.temperature for result in results] == pytest.approx([0.0, 0.8, 1.0])
    assert all(result.chain < 1.3 for result in results)
    assert any("tokens/round" in line for line in describe(results))


def test_ranks_count_what_is_better() -> None:
    logits = np.array([[1.0, 3.0, 2.0]], np.float32)
    silence = np.zeros((1, 3), np.float32)
    assert [int(ranks(logits, np.array([token], np.int32), silence)[0]) for token in range(3)] == [2, 0, 1]
    noise = np.array([[5.0, 0.0, 0.0]], np.float32)
    assert int(ranks(logits, np.array([0], np.int32), noise)[0]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["medusa", "--text", "x", "--output", "o"], "--target --bundle is required"),
        (["medusa", "--target", "t", "--bundle", "b", "--text", "x", "--output", "o"], "not allowed with"),
        (["draft", "--target", "t", "--text", "x", "--output", "o"], "--config"),
        (["medusa", "--target", "t", "--text", "x", "--output", "o", "--heads", "0"], "at least 1"),
        (["medusa", "--target", "t", "--text", "x", "--output", "o", "--rate", "nan"], "must be positive"),
        (["medusa", "--target", "t", "--text", "x", "--output", "o", "--temperatures", "0,-1"], "from 0 to 10"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_without_pytorch_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["medusa", "--target", "t", "--text", "x", "--output", "o"]) == 1
    assert 'pip install "ull[train]"' in capsys.readouterr().err


# With PyTorch


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_a_few_steps_give_what_ull_build_takes(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    target = write_checkpoint(tmp_path / "model", tied=True)
    config = write_checkpoint(tmp_path / "shape", tied=True, config={"hidden_size": 32, "num_hidden_layers": 1})
    text = tmp_path / "text.txt"
    text.write_text("".join(TRAINING_TEXT))
    output = tmp_path / kind
    numbers = ["--sequences", "6", "--response-tokens", "20", "--steps", "6", "--threads", "1", "--device", "cpu"]
    common = ["--target", str(target), "--text", str(text), "--heldout", str(text), "--output", str(output), *numbers]
    extra = ["--heads", "2", "--layers", "2"] if kind == "medusa" else ["--config", str(config / "config.json")]
    assert cli.main([kind, *common, *extra]) == 0, capsys.readouterr().err
    assert "tokens/round" in capsys.readouterr().out and (output / "acceptance.json").exists()
    drafters = {"medusa": SpeculationSettings(medusa=output), "draft": SpeculationSettings(draft=output)}
    settings = Settings(target, tmp_path / "x.ull", "x", evaluate=False, speculation=drafters[kind])
    spec = open_bundle(build(settings).path).native_spec()
    assert (spec["medusa"] == {"heads": 2, "layers": 2, "version": "2"}) if kind == "medusa" else spec["draft"]
