"""The trainers of EAGLE-3 and DFlash heads: they draft in training as the engine does, and learn."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import TRAINING_TEXT, write_checkpoint
from ull.bundle import open_bundle
from ull_build.build import build
from ull_build.progress import Reporter
from ull_build.settings import Settings
from ull_build.source.vocabulary import read_tokenizer
from ull_build.train import cli
from ull_build.train.data import Plan, Sequences, encode_documents, generate
from ull_build.train.unpack import bundle_weights

torch = pytest.importorskip("torch")

PLAN = Plan(sequences=8, prompt_tokens=24, response_tokens=40)
LENGTH = 24  # tokens of the row that a plain evaluation repeats


class Material:
    """A target with random weights, and what it wrote."""

    def __init__(self, folder: Path) -> None:
        from ull_build.train.model import frozen_target

        self.checkpoint = write_checkpoint(folder / "model", tied=True)
        bundle = open_bundle(build(Settings(self.checkpoint, folder / "x.ull", "x", evaluate=False)).path)
        tokenizer = read_tokenizer(bundle.tokenizer_directory, bundle.manifest.model.vocabulary)
        documents = encode_documents(TRAINING_TEXT, tokenizer)
        self.documents = [np.array([0, *ids], np.int32) for ids in documents]
        self.outputs: Sequences = generate(bundle, documents, [0], PLAN, 1, Reporter())
        self.target = frozen_target(bundle.manifest.model, bundle_weights(bundle), torch.device("cpu"))
        self.model = bundle.manifest.model

    def row(self) -> Any:
        return torch.from_numpy(self.outputs.tokens[:LENGTH]).long()[None]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    torch.set_num_threads(1)
    return Material(tmp_path_factory.mktemp("heads"))


class Losses(Reporter):
    """Keeps the losses that a training reports."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def note(self, text: str) -> None:
        self.values += [float(value) for value in re.findall(r"loss ([\d.]+)", text)]


def turned(states: Any, position: int, theta: float) -> Any:
    """Rotate-half RoPE of [heads, head_dim]."""
    half = states.shape[-1] // 2
    angles = torch.tensor([position * theta ** (-index / half) for index in range(half)])
    first, second = states[:, :half], states[:, half:]
    turn = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
    return torch.cat(turn, dim=-1)


def attended(query: Any, seen: list[tuple[Any, Any]]) -> Any:
    """One position's [heads, head_dim] over keys and values [kv_heads, head_dim]."""
    group = len(query) // len(seen[0][0])
    rows = []
    for head, vector in enumerate(query):
        scores = torch.stack([vector @ key[head // group] for key, _ in seen]) / math.sqrt(len(vector))
        rows.append(
            sum(share * value[head // group] for share, (_, value) in zip(scores.softmax(0), seen, strict=True))
        )
    return torch.cat(rows)


def shuffled(head: Any) -> Any:
    """The head with weights of which none is zero or one, so that each of them counts."""
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data = parameter.data + 0.2 * torch.randn(parameter.shape, generator=generator)
    return head.requires_grad_(False)


def test_a_chain_in_training_is_what_drafting_token_by_token_gives(material: Material) -> None:
    from ull_build.train.eagle import Settings as EagleSettings
    from ull_build.train.eagle import make_head

    depths, model = 3, material.model
    settings = EagleSettings(taps=(0, 2), vocabulary=100, intermediate=48, depths=depths)
    head = shuffled(make_head(material.target, settings, material.outputs))
    tokens = material.row()
    _, taps = material.target.tapped(tokens, settings.taps)
    embedded = material.target.model.embed_tokens(tokens)
    chains = head.chains(taps, embedded, depths)
    layer, attention = head.midlayer, head.midlayer.self_attn

    def entry(position: int, states: Any, seen: list[tuple[Any, Any]]) -> Any:
        """Output of the entry at `position`, which reads the token behind it; its key and value join `seen`."""
        pair = torch.cat((layer.input_layernorm(embedded[0, position + 1]), layer.hidden_norm(states)))
        shape = (-1, model.head_dim)
        key = turned(attention.k_proj(pair).view(shape), position, model.rope.theta)
        seen.append((key, attention.v_proj(pair).view(shape)))
        query = turned(attention.q_proj(pair).view(shape), position, model.rope.theta)
        states = states + attention.o_proj(attended(query, seen))
        return states + layer.mlp(layer.post_attention_layernorm(states))

    true: list[tuple[Any, Any]] = []
    for position in range(LENGTH - depths):
        states = entry(position, head.fc(torch.cat([tap[0, position] for tap in taps])), true)
        seen = list(true)
        for depth in range(depths):
            if depth:
                states = entry(position + depth, states, seen)
            torch.testing.assert_close(chains[depth][0, position], head.norm(states), rtol=1e-4, atol=1e-4)


def test_a_block_in_training_is_what_a_pass_of_its_own_gives(material: Material) -> None:
    from ull_build.train.dflash import Places, make_head
    from ull_build.train.dflash import Settings as DflashSettings

    block, model, mask = 4, material.model, 7
    settings = DflashSettings(taps=(1, 2), intermediate=48, mask_token=mask, block=block, rank=8)
    head = shuffled(make_head(material.target, settings))
    tokens = material.row()
    _, taps = material.target.tapped(tokens, settings.taps)
    anchors = torch.tensor([1, 9, LENGTH - block - 1])
    embedding = material.target.model.embed_tokens
    slots = head.slots(taps, tokens, embedding, Places(model, anchors, block, LENGTH))[0].unflatten(0, (3, block))
    shape = (-1, model.head_dim)

    def pair(layer: Any, states: Any, position: int) -> tuple[Any, Any]:
        attention = layer.self_attn
        key = turned(attention.k_norm(attention.k_proj(states).view(shape)), position, model.rope.theta)
        return key, attention.v_proj(states).view(shape)

    for place, anchor in enumerate(anchors.tolist()):
        context = [
            head.hidden_norm(head.fc(torch.cat([tap[0, position] for tap in taps]))) for position in range(anchor)
        ]
        states = [embedding(torch.tensor(token)) for token in (int(tokens[0, anchor]), mask, mask, mask)]
        for layer in head.layers:
            inputs = [layer.input_layernorm(one) for one in states]
            seen = [pair(layer, one, position) for position, one in enumerate(context)]
            seen += [pair(layer, one, anchor + slot) for slot, one in enumerate(inputs)]
            for slot, one in enumerate(inputs):
                query = layer.self_attn.q_norm(layer.self_attn.q_proj(one).view(shape))
                mixed = attended(turned(query, anchor + slot, model.rope.theta), seen)
                states[slot] = states[slot] + layer.self_attn.o_proj(mixed)
                states[slot] = states[slot] + layer.mlp(layer.post_attention_layernorm(states[slot]))
        for slot, one in enumerate(states):
            torch.testing.assert_close(slots[place, slot], head.norm(one), rtol=1e-4, atol=1e-4)


def test_a_block_heads_layers_begin_as_the_targets_last(material: Material) -> None:
    from ull_build.train.dflash import Settings as DflashSettings
    from ull_build.train.dflash import make_head

    model = material.model
    inputs = torch.randn(5, model.hidden, generator=torch.Generator().manual_seed(0))
    source = material.target.model.layers[model.layers - 1]
    for wider in (0, 16):
        settings = DflashSettings(taps=(1, 2), intermediate=model.intermediate + wider, mask_token=7, layers=1)
        layer = make_head(material.target, settings).requires_grad_(False).layers[0]
        torch.testing.assert_close(layer.mlp(inputs), source.mlp(inputs))
        for name in ("q_proj", "k_proj", "v_proj"):
            theirs = getattr(source.self_attn, name)(source.input_layernorm(inputs))
            torch.testing.assert_close(getattr(layer.self_attn, name)(layer.input_layernorm(inputs)), theirs)
    narrow = DflashSettings(taps=(1, 2), intermediate=model.intermediate - 1, mask_token=7, layers=1)
    rows = make_head(material.target, narrow).layers[0].mlp.gate_proj.weight.tolist()
    assert all(row in source.mlp.gate_proj.weight.tolist() for row in rows)


def test_the_loss_of_an_eagle_head_falls(material: Material, tmp_path: Path) -> None:
    from ull_build.train.eagle import Settings as EagleSettings
    from ull_build.train.eagle import train_eagle

    losses = Losses()
    settings = EagleSettings(taps=(1, 2), vocabulary=200, intermediate=48, depths=3, steps=60, length=64)
    device = torch.device("cpu")
    train_eagle(material.target, material.documents, material.outputs, settings, device, losses, tmp_path)
    assert losses.values[-1] < 0.95 * losses.values[0]


def test_the_loss_of_a_dflash_head_falls(material: Material, tmp_path: Path) -> None:
    from ull_build.train.dflash import Settings as DflashSettings
    from ull_build.train.dflash import train_dflash

    losses = Losses()
    settings = DflashSettings(taps=(1, 2), intermediate=48, mask_token=7, block=4, rank=8, steps=120, length=64)
    device = torch.device("cpu")
    train_dflash(material.target, material.documents, material.outputs, settings, device, losses, tmp_path)
    assert losses.values[-1] < 0.95 * losses.values[0]


def test_agreement_is_that_of_shared_noise() -> None:
    from ull_build.train.dflash import agreement

    generator = torch.Generator().manual_seed(0)
    one, other = torch.tensor([[0.0, 1.0]] * 4000), torch.tensor([[1.0, 0.0]] * 4000)
    for temperature in (0.0, 1.0):
        assert agreement(one, one + 3, temperature, generator).min() == 1
    assert agreement(one, other, 0.0, generator).max() == 0
    # They choose the same unless the difference of two Gumbels lies within 1 of 0: tanh(1 / 2).
    share = float(agreement(one, other, 1.0, generator).mean())
    assert share == pytest.approx(1 - math.tanh(0.5), abs=0.03)


def test_a_soft_cross_entropy_is_what_autograd_says() -> None:
    from ull_build.train.loop import SoftCrossEntropy

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, requires_grad=True)
    shares = torch.rand(5, 11, generator=generator)  # whose rows sum to anything
    plain = -(shares * logits.log_softmax(-1)).sum()
    (wanted,) = torch.autograd.grad(plain, logits)
    found = SoftCrossEntropy.apply(logits, shares)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], wanted)


def arguments(kind: str, material: Material, text: Path, output: Path, *more: str) -> list[str]:
    common = ["--target", str(material.checkpoint), "--text", str(text), "--heldout", str(text)]
    numbers = ["--sequences", "6", "--response-tokens", "20", "--steps", "4", "--threads", "1", "--device", "cpu"]
    own = ["--depths", "2", "--vocabulary", "150"] if kind == "eagle3" else ["--block", "4", "--rank", "8"]
    return [kind, *common, *numbers, *own, "--intermediate", "48", "--output", str(output), *more]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(TRAINING_TEXT))
    yield path


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_few_steps_give_a_head_in_the_public_form(
    kind: str, material: Material, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    assert cli.main(arguments(kind, material, text, tmp_path / "a")) == 0, capsys.readouterr().err
    assert "tokens/round" in capsys.readouterr().out
    tensors, config = load_file(tmp_path / "a/model.safetensors"), json.loads((tmp_path / "a/config.json").read_text())
    hidden, layers = material.model.hidden, material.model.layers
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    count = len({max(1, layers * part // 3) for part in (1, 2, 3)})
    assert shapes["fc.weight"] == (hidden, count * hidden)
    if kind == "eagle3":
        assert shapes["midlayer.self_attn.q_proj.weight"][1] == 2 * hidden
        assert shapes["lm_head.weight"] == (150, hidden) and config["draft_vocab_size"] == 150
        known = torch.arange(150) + tensors["d2t"]
        assert torch.equal(tensors["t2d"].nonzero()[:, 0], known)
        assert config["eagle_aux_hidden_state_layer_ids"][-1] == layers
    else:
        assert shapes["markov_head.markov_w2.weight"] == (material.model.vocabulary, 8)
        assert shapes["confidence_head.proj.weight"] == (1, hidden + 8)
        assert config["block_size"] == 4 and config["target_layer_ids"][-1] == layers - 1
    # --initial goes on from there: one step later little has changed, and everything is still there.
    assert (
        cli.main(arguments(kind, material, text, tmp_path / "b", "--initial", str(tmp_path / "a"), "--steps", "1")) == 0
    )
    later = load_file(tmp_path / "b/model.safetensors")
    assert shapes == {name: tuple(value.shape) for name, value in later.items()}
    for name, value in tensors.items():
        assert (later[name].float() - value.float()).abs().max() < 0.02, name


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("eagle3", ["--taps", "1,99"], "taps 1,99: the target has"),
        ("dflash", ["--taps", "0,1"], "give at most 8 from 1 to"),
        ("dflash", ["--mask-token", "100000"], "token 100000 is not in the target's vocabulary"),
        ("eagle3", ["--depths", "600"], "too short for drafts of 600; draft less far"),
        ("eagle3", ["--initial", "none"], "none has no model.safetensors to go on from"),
    ],
)
def test_what_does_not_fit_the_target_is_refused(
    kind: str, more: list[str], message: str, material: Material, text: Path, tmp_path: Path, capsys: Any
) -> None:
    assert cli.main(arguments(kind, material, text, tmp_path / "out", *more)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("eagle3", ["--taps", "3,1"], "must be layers in ascending order"),
        ("dflash", ["--block", "33"], "must be from 2 to 32"),
        ("dflash", ["--rank", "0"], "at least 1"),
    ],
)
def test_wrong_options_of_heads_are_named(kind: str, more: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([kind, "--target", "t", "--text", "x", "--output", "o", *more])
    assert stop.value.code == 2 and message in capsys.readouterr().err
