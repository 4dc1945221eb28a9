"""A model of the Hugging Face Hub as `--model`: the real library against a double of the Hub on loopback."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapters import floats, write_adapter
from checkpoints import write_checkpoint
from hub import COMMIT, HubDouble, Repository, files_of
from ull.bundle import Manifest, open_bundle
from ull.cli import main as ull
from ull.errors import CheckpointError
from ull_build import cli
from ull_build.recipe import load_recipe, make_recipe
from ull_build.settings import settings_from_recipe
from ull_build.source.hub import HubId, hub_id, named_source

pytest.importorskip("huggingface_hub")

ID = "org/tiny"
Hub = Callable[..., HubDouble]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A checkpoint with what repositories hold beside it."""
    directory = write_checkpoint(tmp_path / "source", shards=2)
    beside = ["README.md", "pytorch_model.bin", "original/model.safetensors", "onnx/model.onnx", "tiny.Q4_K_M.gguf"]
    return {**files_of(directory), **dict.fromkeys([*beside, "consolidated.safetensors"], b"x")}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Starts doubles of the Hub, with an empty cache, in an empty directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "5")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    running = []

    def starts(**repositories: Repository) -> HubDouble:
        hub = HubDouble({f"org/{name}": repository for name, repository in repositories.items()})
        hub.__enter__()
        running.append(hub)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        return hub

    yield starts
    for hub in running:
        hub.__exit__()


def built(*arguments: str) -> Manifest:
    assert cli.main([*arguments, "--output", "x.ull", "--no-eval", "--quiet", "--force"]) == 0
    return open_bundle(Path("x.ull")).manifest


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a build that fails."""
    capfd.readouterr()
    assert cli.main([*arguments, "--output", "x.ull", "--no-eval", "--quiet"]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and error.startswith("ull-build: error: ") and not Path("x.ull").exists()
    return error


def test_a_build_fetches_what_it_reads(
    start: Hub, files: dict[str, bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hub = start(tiny=Repository(files))
    found = built("--model", ID)
    wanted = {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"}
    assert hub.fetched() == wanted | {f"model-0000{shard}-of-00002.safetensors" for shard in (1, 2)}
    assert found.provenance.source == ID and found.provenance.hub == {"model": f"{ID}@{COMMIT}"}
    assert found.provenance.recipe["model"] == f"hf://{ID}"
    local = built("--model", str(tmp_path / "source"))
    assert local.provenance.source_sha256 == found.provenance.source_sha256 and local.provenance.hub == {}
    assert local.files["weights.safetensors"] == found.files["weights.safetensors"]
    built("--model", ID)
    capfd.readouterr()
    assert ull(["inspect", "x.ull"]) == 0
    assert f"{ID}@{COMMIT}" in capfd.readouterr().out.replace("\n", "")


def test_a_revision(start: Hub, files: dict[str, bytes], capfd: pytest.CaptureFixture[str]) -> None:
    start(tiny=Repository(files, branches=("main", "v2", "refs/pr/1")))
    for revision in ("v2", "refs/pr/1", COMMIT):
        assert built("--model", f"{ID}@{revision}").provenance.hub == {"model": f"{ID}@{COMMIT}"}
    Path("x.ull").rename("y.ull")
    assert "org/tiny has no revision 'v3'; give a branch, tag or commit of it" in refused(capfd, "--model", f"{ID}@v3")


def test_without_the_hub_the_cache_is_used(
    start: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub = start(tiny=Repository(files))
    first = built("--model", ID)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert built("--model", ID).provenance == first.provenance
    assert hub.requests == []
    Path("x.ull").rename("y.ull")
    line = refused(capfd, "--model", "org/other")
    assert "org/other is neither a directory nor in the Hub's cache, and HF_HUB_OFFLINE is set; unset it, or " in line
    assert "run `hf download org/other --local-dir other` on a machine that reaches it" in line
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert cli.main(["--model", ID, "--output", "x.ull", "--no-eval", "--force"]) == 0
    assert f"{ID}@{COMMIT}: from the cache, since the Hub cannot be reached" in capfd.readouterr().out
    Path("x.ull").rename("z.ull")
    line = refused(capfd, "--model", "org/other@v1")
    assert "nor in the Hub's cache, and the Hub cannot be reached (" in line
    assert "`hf download org/other --revision v1 --local-dir other`" in line


def test_unknown_and_gated_models(start: Hub, files: dict[str, bytes], capfd: pytest.CaptureFixture[str]) -> None:
    hub = start(tiny=Repository(files, gated=True))
    line = refused(capfd, "--model", "org/none")
    assert "no such directory as org/none, and the Hub knows no model of that name; check the spelling" in line
    line = refused(capfd, "--model", ID)
    assert f"org/tiny is gated: ask for access at {hub.url}/org/tiny, then `hf auth login` (or set HF_TOKEN)" in line


def test_a_hub_that_fails(start: Hub, files: dict[str, bytes], capfd: pytest.CaptureFixture[str]) -> None:
    start(tiny=Repository(files)).broken = True
    line = refused(capfd, "--model", ID)
    assert "the Hub refused org/tiny (" in line and "503" in line and "try again later" in line


def test_a_download_that_breaks_off_goes_on_the_next_time(
    start: Hub, files: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    weights = "model-00002-of-00002.safetensors"
    repository = Repository(files, breaks={weights})
    hub = start(tiny=repository)
    line = refused(capfd, "--model", ID)
    assert "org/tiny could not be downloaded (" in line and "build again to go on from there" in line
    repository.breaks.clear()
    hub.requests.clear()
    built("--model", ID)
    assert hub.fetched() == {weights}


def test_an_interrupt_ends_a_download_at_once(start: Hub, files: dict[str, bytes]) -> None:
    hub = start(tiny=Repository(files, stalls={"model-00001-of-00002.safetensors"}))
    command = [sys.executable, "-m", "ull_build", "--model", ID, "--output", "x.ull", "--no-eval"]
    process = subprocess.Popen(
        command, env={**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "600"}, stderr=subprocess.PIPE, text=True
    )
    try:
        assert hub.stalled.wait(120)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and error == "ull-build: interrupted; no half bundle is left\n"


@pytest.mark.parametrize(
    ("names", "tags", "words"),
    [
        ("a.gguf", ["base_model:quantized:org/whole"], "original bf16, fp16 or fp32 weights: --model org/whole"),
        ("a.gguf", [], "holds GGUF files, whose weights are quantised for llama.cpp; build from the original"),
        ("a.gguf", [], "the model that it was made from, in safetensors (--model ORG/NAME)"),
        ("config.json pytorch_model.bin", [], "org/tiny has only pickled weights (pytorch_model.bin); convert them: "),
        ("config.json pytorch_model.bin", [], ".from_pretrained('org/tiny').save_pretrained('DIR')"),
        ("config.json tf_model.h5", [], ".from_pretrained('org/tiny', from_tf=True)"),
        ("flax_model.msgpack", [], "Flax's weights (flax_model.msgpack); convert them"),
        ("model.onnx", [], "org/tiny has only ONNX graphs; build from the original"),
        (
            "adapter_config.json adapter_model.safetensors",
            ["base_model:adapter:org/b"],
            "is a LoRA adapter of org/b",
        ),
        ("adapter_config.json adapter_model.safetensors", ["base_model:org/b"], "give --model org/b --lora org/tiny"),
        ("README.md", [], "org/tiny has no model.safetensors, and no weights in another form"),
    ],
)
def test_models_without_safetensors_are_not_downloaded(
    start: Hub, capfd: pytest.CaptureFixture[str], names: str, tags: list[str], words: str
) -> None:
    hub = start(tiny=Repository(dict.fromkeys(names.split(), b"x"), tags=tuple(tags)))
    assert words in refused(capfd, "--model", ID)
    assert hub.fetched() == set()


def test_adapters_and_draft_models_may_come_from_there(start: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain")
    adapter = write_adapter(tmp_path / "adapter", floats(plain / "model.safetensors"), base_model_name_or_path=ID)
    start(tiny=Repository(files), adapter=Repository(files_of(adapter), commit="a" * 40))
    found = built("--model", ID, "--lora", "org/adapter", "--draft", ID)
    assert found.provenance.hub == {
        "model": f"{ID}@{COMMIT}",
        "lora": f"org/adapter@{'a' * 40}",
        "draft": f"{ID}@{COMMIT}",
    }
    assert found.provenance.lora is not None and "draft" in found.provenance.drafters
    local = built("--model", str(tmp_path / "source"), "--lora", str(adapter), "--draft", str(tmp_path / "source"))
    assert local.files["weights.safetensors"] == found.files["weights.safetensors"]


PATHS = "tiny ./org/tiny ../org/tiny /org/tiny a/org/tiny org/tiny/ ~/tiny org/tiny.gguf org/tiny@ -x/y org//tiny"


@pytest.mark.parametrize("text", PATHS.split())
def test_paths_are_never_taken_for_ids(text: str, tmp_path: Path) -> None:
    assert hub_id(named_source(text, tmp_path)) is None


def test_a_directory_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id(named_source("org/tiny", Path())) == HubId("org/tiny", None)
    assert hub_id(named_source("org/tiny@v1", Path())) == HubId("org/tiny", "v1")
    Path("org/tiny").mkdir(parents=True)
    assert named_source("org/tiny", Path()) == "org/tiny"
    assert hub_id(named_source("hf://org/tiny", Path())) == HubId("org/tiny", None)
    with pytest.raises(CheckpointError, match="no id of the Hugging Face Hub; write hf://ORG/NAME"):
        settings_from_recipe(make_recipe({"model": "hf://tiny", "name": "x"}, "test"))


def test_a_recipe_names_its_own_directories_and_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = tmp_path / "recipes"
    (recipes / "org" / "near").mkdir(parents=True)
    (tmp_path / "org" / "far").mkdir(parents=True)

    def settings(text: str) -> tuple[Path, dict[str, str]]:
        (recipes / "x.toml").write_text(text)
        found = settings_from_recipe(load_recipe(Path("recipes/x.toml"), {}))
        return found.model, {kind: str(wanted) for kind, wanted in found.from_hub.items()}

    assert settings('model = "org/near"') == (Path("recipes/org/near"), {})
    assert settings('model = "org/far"')[1] == {"model": "org/far"}  # it is not beside the recipe
    assert settings('model = "tiny"') == (Path("recipes/tiny"), {})
    assert settings('model = "m"\nlora = "a/b@c"\n[eagle]\nhead = "d/e"')[1] == {"lora": "a/b@c", "eagle": "d/e"}
