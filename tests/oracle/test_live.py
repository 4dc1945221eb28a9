"""The fixtures against transformers as it is installed (`make oracle`): are they still what it computes?

Also compares the cpu executor with transformers live, on prompts that no fixture holds.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file

from ull._native import CpuModel
from ull.bundle import open_bundle
from ull_build.build import build
from ull_build.settings import Settings
from ull_build.weights.pack_cpu import ORIGINAL_F32

from .cases import CASES, TOLERANCE, Case, assemble
from .make_fixtures import all_logits, deterministic, expectation, load, write_checkpoint

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.parametrize("case", CASES, ids=lambda case: case.name),
]

# Another processor or version of torch may sum in another order.
REGENERATED_ERROR = 2e-5


@pytest.fixture(autouse=True, scope="module")
def reproducible() -> None:
    deterministic()


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whatever its shards."""
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def configuration(directory: Path) -> dict[str, Any]:
    """config.json as transformers understands it."""
    values = transformers.AutoConfig.from_pretrained(directory).to_dict()
    return {key: value for key, value in values.items() if key not in {"transformers_version", "_name_or_path"}}


def committed(case: Case) -> dict[str, np.ndarray]:
    with np.load(case.directory / "expected.npz") as arrays:
        return dict(arrays)


def test_the_checkpoint_regenerates(case: Case, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path, int(committed(case)["seed"]))
    assert configuration(tmp_path) == configuration(case.directory)
    fresh, stored = tensors(tmp_path), tensors(case.directory)
    assert fresh.keys() == stored.keys()
    for name, value in fresh.items():
        assert value.dtype == stored[name].dtype
        assert torch.equal(value, stored[name]), name


def test_transformers_still_expects_the_same(case: Case) -> None:
    stored = committed(case)
    fresh = expectation(load(case.directory), stored["prompt"])
    np.testing.assert_array_equal(fresh["greedy"], stored["greedy"])
    np.testing.assert_array_equal(fresh["positions"], stored["positions"])
    assert np.abs(fresh["logits"] - stored["logits"]).max() <= REGENERATED_ERROR * np.abs(stored["logits"]).max()


def test_the_executor_agrees_on_a_fresh_prompt(case: Case, tmp_path: Path) -> None:
    generator = np.random.default_rng(20240521)
    tokens = generator.integers(0, case.config["vocab_size"], 230, dtype=np.int32)
    settings = Settings(
        model=assemble(case, tmp_path / "checkpoint"),
        output=tmp_path / "engine.ull",
        name=case.name,
        precision=ORIGINAL_F32,
        evaluate=False,
    )
    ours = CpuModel(open_bundle(build(settings).path).native_spec()).logits(tokens)
    theirs = all_logits(load(case.directory), tokens[None])[0]
    assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()
