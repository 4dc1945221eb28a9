"""`ull-build` as a user meets it: recipes, the measured loss, the output directory, errors and interrupts."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from checkpoints import write_checkpoint, write_json
from ull.bundle import FileEntry, open_bundle
from ull.errors import BuildError, BundleError, RecipeError
from ull_build import cli
from ull_build.build import build
from ull_build.output import file_entry
from ull_build.progress import PlainReporter
from ull_build.quality.evaluate import EvaluationText, Predictions, check_quality, read_text
from ull_build.recipe import Recipe, describe_keys, load_recipe, make_recipe
from ull_build.settings import Settings
from ull_build.source.vocabulary import read_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


# Recipes


def write_recipe(directory: Path, text: str) -> Path:
    path = directory / "small.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_recipe_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, 'model = "m"\neval_text = "m/text.txt"\nlm_head = "fp8"\ncontext = 64\n')
    recipe = load_recipe(path, {})
    assert (recipe.model, recipe.eval_text) == (str(tmp_path / "m"), str(tmp_path / "m/text.txt"))
    assert (recipe.name, recipe.output) == ("small", "small.ull")
    assert (recipe.precision, recipe.lm_head, recipe.context) == ("fp8", "fp8", 64)
    changed = load_recipe(path, {"output": "other.ull", "precision": "bf16", "eval_text": "here.txt"})
    assert (changed.name, changed.output, changed.precision) == ("small", "other.ull", "bf16")
    assert changed.eval_text == "here.txt"


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ('model = "m"\nprecison = "fp8"', "precison", "unknown key `precison`; did you mean `precision`"),
        ('model = "m"\nmax_ppl_increase = 1', "max_ppl_increase", "did you mean `max_perplexity_increase`"),
        ('model = "m"\nzzz = 1', "zzz", "valid keys: model, name, output, target"),
        ('name = "m"', "model", "`model` is missing"),
        ('model = "m"\nprecision = "int4"', "precision", "int4"),
        ('model = "m"\ncontext = 0', None, "`context` must be at least 1"),
        ('model = "m"\ncontext = "long"', "context", "Expected `int"),
        ('model = "m"\neval_tokens = 1', "eval_tokens", "2"),
        ('model = "m"\nmax_perplexity_increase = inf', None, "must be finite"),
        ('model = "m"\nmodel = "n"', None, "cannot be read"),
        ('model = "m"\ntarget = "sm_80"', "target", '"sm_80" is unknown; use "cpu"'),
        ('model = "m"\ntarget = "tpu"', "target", '"tpu" is unknown; use "cpu"'),
    ],
)
def test_wrong_recipes(tmp_path: Path, text: str, field: str | None, words: str) -> None:
    path = write_recipe(tmp_path, text)
    with pytest.raises(RecipeError, match=words) as caught:
        load_recipe(path, {})
    assert str(path) in str(caught.value)
    if field is not None:
        assert caught.value.field == field


def test_the_name_follows_the_output_when_there_is_no_recipe() -> None:
    assert make_recipe({"model": "m", "output": "some/where/big.ull"}, "here").name == "big"


def test_every_key_of_a_recipe_is_documented() -> None:
    rows = describe_keys()
    tables = {
        "medusa": ["medusa.heads", "medusa.num"],
        "draft": ["draft.model"],
        "eagle": ["eagle.head", "eagle.taps", "eagle.theta", "eagle.norm_output"],
        "dflash": ["dflash.head", "dflash.taps", "dflash.theta", "dflash.anchor_predicts"],
        "speculation": ["speculation.max_tree"],
        "forward": [
            "forward.prefill",
            "forward.decode",
            "forward.attention",
            "forward.profiles",
            "forward.tree_products",
            "forward.logits_limit",
        ],
    }
    keys = [key for name in Recipe.__struct_fields__ for key in tables.get(name, [name])]
    assert [key for key, _, _ in rows] == keys
    assert all(len(meaning) > 20 for _, _, meaning in rows)


def test_the_recipes_of_the_repository_are_valid() -> None:
    for path in (ROOT / "engines").glob("*.toml"):
        recipe = load_recipe(path, {})
        assert recipe.output == f"{path.stem}.ull"
        if not path.stem.startswith("tiny"):
            continue  # its checkpoints are downloaded
        assert Path(recipe.model).is_dir()
        assert recipe.medusa is None or Path(recipe.medusa.heads).is_dir()
        assert recipe.draft is None or Path(recipe.draft.model).is_dir()
        assert recipe.eval_text is None or Path(recipe.eval_text).is_file()


# The measured loss


def test_evaluation_windows_begin_like_a_sequence(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(checkpoint, 330)
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    ids = tokenizer.encode(path.read_text())
    text = read_text(path, tokenizer, max_tokens=100, context=32)
    rows = text.tokens.reshape(-1, text.window)
    assert (text.window, len(rows), text.predictions, text.name) == (32, 3, 93, "text.txt")
    assert (rows[:, 0] == 0).all()
    assert rows[:, 1:].reshape(-1).tolist() == ids[:93]
    short = read_text(path, tokenizer, max_tokens=1 << 20, context=1 << 20)
    assert short.window == min(512, len(ids) + 1)


def test_evaluation_text_errors(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(checkpoint, 330)
    with pytest.raises(BuildError, match="cannot be read as UTF-8"):
        read_text(tmp_path / "nowhere.txt", tokenizer, 100, 100)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(BuildError, match="cannot be read as UTF-8"):
        read_text(tmp_path / "latin", tokenizer, 100, 100)
    (tmp_path / "empty").write_text("")
    with pytest.raises(BuildError, match=r"gives 0 tokens.*--no-eval"):
        read_text(tmp_path / "empty", tokenizer, 100, 100)


def test_the_default_text_is_long_enough(checkpoint: Path) -> None:
    text = read_text(None, read_tokenizer(checkpoint, 330), 1 << 20, 1 << 20)
    assert text.predictions > 1500


def predictions(nll: float, argmax: list[int]) -> Predictions:
    return Predictions(np.full(4, nll, np.float32), np.array(argmax, np.int32))


def test_quality_is_compared_as_a_fraction_of_perplexity() -> None:
    original, worse = predictions(2.0, [1, 2, 3, 4]), predictions(2.05, [1, 2, 3, 5])
    assert original.perplexity == pytest.approx(np.exp(2.0))
    assert original.agreement(worse) == 0.75
    assert check_quality(original, worse, 0.06) == pytest.approx(np.expm1(0.05), rel=1e-5)
    assert check_quality(worse, original, 0.0) == pytest.approx(np.expm1(-0.05), rel=1e-5)
    with pytest.raises(BuildError, match=r"rises from 7.3891 to 7.7679, by 5.13%; the limit is 5.00%.*bf16"):
        check_quality(original, worse, 0.05)
    with pytest.raises(BuildError, match="by nan%"):
        check_quality(original, predictions(float("nan"), [1, 2, 3, 4]), 0.05)


def fake_predict(monkeypatch: pytest.MonkeyPatch, change: float) -> list[str]:
    """Replaces the native evaluation: the bundle's loss is `change` nats above the original's. Returns the files."""
    files: list[str] = []

    def predict(spec: dict[str, Any], text: EvaluationText, threads: int, progress: Any, scales: Any) -> Predictions:
        files.append(f"{Path(spec['path']).name} {spec['kv_dtype']}")
        progress(1, 2)
        progress(2, 2)
        nll = 3.0 if Path(spec["path"]).name == "original.safetensors" else 3.0 + change
        return Predictions(np.full(text.predictions, nll, np.float32), np.zeros(text.predictions, np.int32))

    monkeypatch.setattr("ull_build.quality.measure.predict", predict)
    return files


def test_a_loss_above_the_limit_leaves_no_bundle(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = fake_predict(monkeypatch, 0.02)
    output = tmp_path / "x.ull"
    arguments = ["--model", str(checkpoint), "--output", str(output)]
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert "by 2.02%; the limit is 1.00%" in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert files == ["original.safetensors f32", "weights.safetensors bf16"]
    assert cli.main([*arguments, "--max-perplexity-increase", "0.05"]) == 0
    quality = open_bundle(output, verify="hashes").manifest.quality
    assert quality is not None and quality.perplexity_increase == pytest.approx(np.expm1(0.02), rel=1e-4)
    assert (quality.top1_agreement, quality.limit) == (1.0, 0.05)
    printed = capsys.readouterr().out
    assert "+2.020%" in printed and "100.00%" in printed
    assert not (output / "original.safetensors").exists()


def test_a_negative_increase_is_reported_as_it_is(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_predict(monkeypatch, -0.01)
    result = build(Settings(model=checkpoint, output=tmp_path / "x.ull", name="x"))
    assert result.manifest.quality is not None
    assert result.manifest.quality.perplexity_increase == pytest.approx(np.expm1(-0.01), rel=1e-4)


def test_random_weights_are_measured_by_the_native_core(tmp_path: Path) -> None:
    """A random model knows nothing: perplexity near the vocabulary's size, and bf16 of bf16 weights loses nothing."""
    checkpoint = write_checkpoint(tmp_path / "m", "qwen3", tied=True, dtype="fp16")
    made = build(Settings(model=checkpoint, output=tmp_path / "x.ull", name="x", max_perplexity_increase=1.0))
    quality = made.manifest.quality
    assert quality is not None
    assert 200 < quality.perplexity_original < 2000
    assert abs(quality.perplexity_increase) < 0.05
    assert 0.5 < quality.top1_agreement <= 1.0
    assert quality.eval_tokens > 1500


# The output directory


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """`ull-build` in a process of its own."""
    command = [sys.executable, "-m", "ull_build", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def build_into(output: Path, checkpoint: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return run("--model", checkpoint, "--output", output, "--no-eval", *more)


def test_builds_and_reports_in_plain_lines(checkpoint: Path, tmp_path: Path) -> None:
    done = build_into(tmp_path / "x.ull", checkpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert "weights to fp8: " in done.stdout and "not measured (--no-eval)" in done.stdout
    assert "\x1b" not in done.stdout
    assert open_bundle(tmp_path / "x.ull", verify="hashes").manifest.name == "x"
    quiet = build_into(tmp_path / "y.ull", checkpoint, "--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_recipe_writes_its_bundle_into_the_current_directory(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    recipe = write_recipe(tmp_path / "recipes", f'model = "{checkpoint}"\nprecision = "bf16"\n')
    assert run(recipe, "--no-eval", "--kv", "f32", cwd=tmp_path).returncode == 0
    manifest = open_bundle(tmp_path / "small.ull").manifest
    assert (manifest.name, manifest.precision.weights, manifest.precision.kv) == ("small", "bf16", "f32")


def test_an_existing_bundle_is_only_replaced_by_force(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.ull"
    assert build_into(output, checkpoint).returncode == 0
    before = (output / "manifest.json").read_bytes()
    refused = build_into(output, checkpoint, "--precision", "bf16")
    assert refused.returncode == 1 and "replace it with --force" in refused.stderr
    assert (output / "manifest.json").read_bytes() == before
    assert build_into(output, checkpoint, "--precision", "bf16", "--force").returncode == 0
    assert open_bundle(output, verify="hashes").manifest.precision.weights == "bf16"
    assert [path.name for path in tmp_path.iterdir()] == ["x.ull"]


def test_a_link_to_a_bundle_stays_a_link(checkpoint: Path, tmp_path: Path) -> None:
    assert build_into(tmp_path / "x.ull", checkpoint).returncode == 0
    (tmp_path / "current.ull").symlink_to("x.ull")
    assert build_into(tmp_path / "current.ull", checkpoint, "--precision", "bf16", "--force").returncode == 0
    assert (tmp_path / "current.ull").is_symlink()
    assert open_bundle(tmp_path / "x.ull").manifest.precision.weights == "bf16"


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"manifest_version": 3}'])
def test_what_is_no_bundle_is_never_touched(checkpoint: Path, tmp_path: Path, manifest: str | None) -> None:
    output = tmp_path / "precious"
    output.mkdir()
    (output / "thesis.txt").write_text("ten years of work")
    if manifest is not None:
        (output / "manifest.json").write_text(manifest)
    done = build_into(output, checkpoint, "--force")
    assert done.returncode == 1 and "not an engine bundle; it stays untouched" in done.stderr
    assert (output / "thesis.txt").read_text() == "ten years of work"


def test_a_damaged_bundle_may_be_replaced(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.ull"
    assert build_into(output, checkpoint).returncode == 0
    write_json(output / "manifest.json", {"format": "ull-engine", "format_version": 99})
    assert build_into(output, checkpoint, "--force").returncode == 0
    open_bundle(output, verify="hashes")


def test_places_that_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    missing = build_into(tmp_path / "no" / "x.ull", checkpoint)
    assert missing.returncode == 1 and "does not exist; create it first" in missing.stderr
    (tmp_path / "file.ull").write_text("text")
    in_the_way = build_into(tmp_path / "file.ull", checkpoint, "--force")
    assert in_the_way.returncode == 1 and "is not an engine bundle" in in_the_way.stderr


def test_a_full_disk_is_noticed_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = __import__("shutil").disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(BuildError, match="are free"):
        build(Settings(model=checkpoint, output=tmp_path / "x.ull", name="x", evaluate=False))
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_writing_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = itertools.count()

    def fail(self: Any, name: str, piece: Any) -> None:
        if next(writes) == 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("ull_build.weights.writer.WeightsWriter.write", fail)
    assert cli.main(["--model", str(checkpoint), "--output", str(tmp_path / "x.ull"), "--no-eval"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_old_bundle_comes_back_when_the_new_one_cannot_take_its_place(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(model=checkpoint, output=tmp_path / "x.ull", name="first", evaluate=False)
    build(settings)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".building-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output error"):
        build(replace(settings, name="second", force=True))
    assert open_bundle(tmp_path / "x.ull", verify="hashes").manifest.name == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["x.ull"]


def test_a_bundle_that_ull_would_refuse_does_not_come_into_being(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(path: Path) -> FileEntry:
        found = file_entry(path)
        return msgspec.structs.replace(found, bytes=found.bytes + 1)

    monkeypatch.setattr("ull_build.build.file_entry", entry)
    with pytest.raises(BundleError, match="bytes"):
        build(Settings(model=checkpoint, output=tmp_path / "x.ull", name="x", evaluate=False))
    assert list(tmp_path.iterdir()) == []


def test_all_of_a_bundle_is_on_the_disk_before_it_is_in_its_place(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "x.ull"
    synced: list[tuple[str, int]] = []  # relative to the bundle, and how many bytes it had
    in_place: list[int] = []  # how many had been synced when the bundle was renamed
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        folder = output if in_place else next(tmp_path.glob(".x.ull.building-*"))
        synced.append((os.path.relpath(path, folder), os.fstat(descriptor).st_size))
        fsync(descriptor)

    def watched_rename(self: Path, target: Path) -> Path:
        in_place.append(len(synced))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    build(Settings(model=checkpoint, output=output, name="x", evaluate=False))
    assert len(in_place) == 1
    before, after = synced[: in_place[0]], synced[in_place[0] :]
    for path in (output, *output.rglob("*")):
        assert (os.path.relpath(path, output), path.stat().st_size) in before
    assert [name for name, _ in after] == [".."]


# Errors and interrupts


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give either a RECIPE or --model DIR"),
        (["a.toml", "--model", "m"], 2, "give either a RECIPE or --model DIR"),
        (["--model", "m"], 2, "--model needs --output"),
        (["--model", "m", "--output", "x", "--precision", "int4"], 2, "invalid choice"),
        (["nowhere.toml"], 2, "no recipe at nowhere.toml"),
        (["--model", "m", "--output", "x", "--target", "sm_80"], 2, 'use "cpu"'),
        (["--model", "m", "--output", "x", "--context", "0"], 2, "at least 1"),
        (["--model", "nowhere", "--output", "x"], 1, "no checkpoint directory at nowhere"),
    ],
)
def test_exit_codes(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_one_line(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", config={"hidden_act": "relu\nsilu"})
    done = build_into(tmp_path / "x.ull", directory)
    assert done.returncode == 1
    assert done.stderr.startswith("ull-build: error: config.json: `hidden_act`")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "Unable to allocate 64.0 GiB"])
def test_memory_that_is_not_there(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    def fail(self: Any, name: str, piece: Any) -> None:
        raise MemoryError(text)

    monkeypatch.setattr("ull_build.weights.writer.WeightsWriter.write", fail)
    assert cli.main(["--model", str(checkpoint), "--output", str(tmp_path / "x.ull"), "--no-eval"]) == 1
    assert capsys.readouterr().err == f"ull-build: error: out of memory{f' ({text})' if text else ''}\n"
    assert list(tmp_path.iterdir()) == []


IMPORT_FAULTS = {
    "raise ImportError('no room')": (1, "ull-build: error: cannot be loaded: no room\n"),
    "raise MemoryError": (1, "ull-build: error: cannot be loaded: out of memory\n"),
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)": (-signal.SIGINT, ""),
}


@pytest.mark.parametrize("statement", IMPORT_FAULTS)
def test_what_goes_wrong_while_the_rest_is_imported(tmp_path: Path, statement: str) -> None:
    (tmp_path / "tokenizers.py").write_text(statement)
    done = run("--version", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == IMPORT_FAULTS[statement]


def test_help_lists_the_keys_of_a_recipe() -> None:
    printed = run("--help").stdout
    assert all(key in printed for key in Recipe.__struct_fields__)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("replaces", [False, True])
def test_an_interrupted_build_leaves_no_half_bundle(
    tmp_path: Path, checkpoint: Path, number: signal.Signals, replaces: bool
) -> None:
    """Stopped while it writes: the staging directory goes, and a bundle that was there stays as it was."""
    output = tmp_path / "x.ull"
    if replaces:
        assert build_into(output, checkpoint).returncode == 0
    process = build_until_it_writes(tmp_path)
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, (out, error)
    assert error == "ull-build: interrupted; no half bundle is left\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large"] + ["x.ull"] * replaces
    if replaces:
        assert open_bundle(output, verify="hashes").manifest.model.hidden == 48


def build_until_it_writes(directory: Path, **options: Any) -> subprocess.Popen[str]:
    """A build of directory/x.ull, from a checkpoint that takes long enough, which has begun to write its weights."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64, "num_attention_heads": 16}
    large = write_checkpoint(
        directory / "large", config={**sizes, "num_hidden_layers": 4, "num_key_value_heads": 16, "vocab_size": 330}
    )
    command = [sys.executable, "-m", "ull_build", "--model", str(large), "--output", str(directory / "x.ull")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    process = subprocess.Popen([*command, "--no-eval", "--force"], **pipes)
    deadline = time.monotonic() + 60
    while not list(directory.glob(".x.ull.building-*/weights.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.002)
    return process


def test_the_next_build_clears_what_a_killed_one_left(tmp_path: Path, checkpoint: Path) -> None:
    process = build_until_it_writes(tmp_path)
    [folder] = tmp_path.glob(".x.ull.building-*")
    process.send_signal(signal.SIGSTOP)  # it is not done before the other
    try:
        beside = build_into(tmp_path / "y.ull", checkpoint)
        assert beside.returncode == 0 and folder.is_dir() and folder.name not in beside.stdout  # the first one lives
    finally:
        process.kill()
    process.communicate(timeout=60)
    assert folder.is_dir()
    done = build_into(tmp_path / "y.ull", checkpoint, "--force")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("removed what killed builds left in") == 1 and done.stdout.count(folder.name) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "y.ull"]


def test_an_ignored_hangup_does_not_end_a_build(tmp_path: Path) -> None:
    process = build_until_it_writes(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, (out, error)
    assert open_bundle(tmp_path / "x.ull").manifest.model.hidden == 1024


def test_an_interrupted_evaluation_leaves_no_half_bundle(tmp_path: Path) -> None:
    """The native core stops at its next report of progress."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 8}
    checkpoint = write_checkpoint(
        tmp_path / "m", config={**sizes, "num_hidden_layers": 12, "num_key_value_heads": 8, "vocab_size": 330}
    )
    command = [sys.executable, "-m", "ull_build", "--model", str(checkpoint), "--output", str(tmp_path / "x.ull")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("original, for comparison"):  # the last line before the evaluation begins
            break
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "ull-build: interrupted; no half bundle is left\n")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_bars_on_a_terminal(checkpoint: Path, tmp_path: Path) -> None:
    """On a terminal there are bars with a rate, and nothing in them makes the build fail."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "ull_build", "--model", str(checkpoint), "--output", str(tmp_path / "x.ull")]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.Popen([*command, "--no-eval"], stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    printed = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        printed += piece
    os.close(leader)
    assert process.wait(timeout=60) == 0
    assert b"weights to fp8" in printed and b"100%" in printed and b"/s" in printed


def test_plain_reporter(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = PlainReporter()
    with reporter.stage("evaluate original", 4096, "tokens") as advance:
        advance(4096)
    printed = capsys.readouterr().out
    assert printed.startswith("evaluate original: 4,096 tokens in ") and printed.endswith("tokens/s)\n")
    with reporter.stage("train", 4000, "steps") as advance:  # ended early, as by --minutes
        advance(7)
    assert capsys.readouterr().out.startswith("train: 7 steps in ")


def test_the_manifest_keeps_the_recipe(checkpoint: Path, tmp_path: Path) -> None:
    assert build_into(tmp_path / "x.ull", checkpoint, "--context", "64").returncode == 0
    recipe = json.loads((tmp_path / "x.ull" / "manifest.json").read_text())["provenance"]["recipe"]
    assert recipe["context"] == 64 and recipe["model"] == str(checkpoint)
