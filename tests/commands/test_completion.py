"""Completion in a shell, made of each program's own parser; and `python -m ull`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ull

PROGRAMS = {
    "ull": "ull.cli",
    "ulld": "ull.daemon.__main__",
    "ull-gateway": "ull.gateway.main",
    "ull-build": "ull_build.__main__",
    "ull-train": "ull_build.train.cli",
}


def script(program: str, shell: str) -> str:
    """What `--print-completion` prints."""
    code = f"import sys; from {PROGRAMS[program]} import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--print-completion", shell]
    done = subprocess.run(command, text=True, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def completed(program: str, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    (folder / "completion.bash").write_text(script(program, "bash"), encoding="utf-8")
    quoted = " ".join(f"'{word}'" for word in (program, *words))
    name = program.replace("-", "_")
    body = f"source ./completion.bash; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _shtab_{name}"
    command = ["bash", "--norc", "-c", f'{body}; printf "%s\\n" "${{COMPREPLY[@]}}"']
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_prints_a_script_for_each_shell(program: str) -> None:
    found = {shell: script(program, shell) for shell in ("bash", "zsh", "tcsh")}
    assert f"complete -o bashdefault -F _shtab_{program.replace('-', '_')} {program}" in found["bash"]
    assert found["zsh"].startswith(f"#compdef {program}\n") and f"complete {program} " in found["tcsh"]


def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    assert {"generate", "chat", "inspect", "demo"} <= completed("ull", tmp_path, "")
    assert completed("ull", tmp_path, "gen") == {"generate"}
    assert completed("ull", tmp_path, "generate", "--max-t") == {"--max-tokens", "--max-tree"}
    assert completed("ull-build", tmp_path, "--kv", "f") == {"fp8", "f32"}
    (tmp_path / "some.toml").touch()
    (tmp_path / "engine.ull").mkdir()
    assert completed("ulld", tmp_path, "--config", "som") == {"some.toml"}
    assert completed("ulld", tmp_path, "eng") == {"engine.ull"}
    assert completed("ull-build", tmp_path, "--lora", "e") == {"engine.ull"}


def test_an_unknown_shell_is_named_with_those_that_are_known() -> None:
    command = [sys.executable, "-m", "ull", "--print-completion", "fish"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert done.returncode == 2 and "'fish' (choose from" in done.stderr


def test_python_m_ull_is_ull() -> None:
    command = [sys.executable, "-m", "ull"]
    found = subprocess.run([*command, "--version"], text=True, capture_output=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, f"ull {ull.__version__}\n")
    refused = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert refused.returncode == 2 and refused.stderr.startswith("usage: ull ")
