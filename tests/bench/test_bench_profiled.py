"""bench/h200/profiled: what it makes of ncu's output, by a stand-in of ncu that writes what an H100's has written."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from conftest import ROOT

sys.path.append(str(ROOT / "bench/h200"))

import profiled
from profiled import WORKS, Work

WRITTEN = Path(__file__).parent / "fixtures/ncu.csv"  # of three works
THREE = (Work(1, 8192), Work(16, 8192), Work(512, 0, chunk=True))
NCU = """#!{python}
import pathlib, sys
words = sys.argv[1:]
log = pathlib.Path(words[words.index("--log-file") + 1])
assert words[-2:] == ["--run", "{bundle}"] and "--clock-control none" in " ".join(words)
log.write_text({text!r})
sys.exit(3 if {old} and "--metrics" in words else {status})
"""


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(profiled, "BUNDLE", tmp_path / "one-layer.ull")
    monkeypatch.setattr(profiled, "build_once", lambda bundle, *options: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "ncu"


def write_ncu(path: Path, text: str, status: int = 0, old: bool = False) -> None:
    """`old`: one that knows no metrics beyond its sections'."""
    path.write_text(NCU.format(python=sys.executable, bundle=profiled.BUNDLE, text=text, status=status, old=old))
    path.chmod(0o755)


def test_a_kernel_has_its_figures_and_worst_stalls() -> None:
    kernels = profiled.read_kernels(WRITTEN.read_text().splitlines())
    assert len(kernels) == 20
    first = kernels[0]
    assert (first["kernel"], first["grid"], first["us"], first["registers"]) == ("qkv_1", "(132, 1, 1)", 14.496, 86)
    shares = [first[name] for name in ("memory", "l2", "tensor_cores", "instructions_per_cycle")]
    assert shares == pytest.approx([0.5252, 0.2153, 0.0414, 0.68])
    assert first["stalls"] == {
        "long_scoreboard": 4.13,
        "wait": 1.79,
        "short_scoreboard": 0.45,
        "no_instruction": 0.23,
    }
    assert first["banks"] is None
    assert profiled.read_kernels(["==PROF== Disconnected"]) == []


def test_what_the_banks_do_is_reads_and_writes() -> None:
    head, units, first, *_ = [line for line in WRITTEN.read_text().splitlines() if line.startswith('"')]
    lines = [f'{head},"{profiled.BANKS[0]}","{profiled.BANKS[1]}"', f'{units},"%","%"', f'{first},"61.5","30.25"']
    (kernel,) = profiled.read_kernels(lines)
    assert kernel["banks"] == pytest.approx(0.9175)
    (unknown,) = profiled.read_kernels([*lines[:2], f'{first},"n/a","n/a"'])
    assert unknown["banks"] is None
    output = io.StringIO()
    profiled.print_profile(Console(file=output, width=160), {"a": [kernel]})
    assert "92%" in output.getvalue()


def test_kernels_are_told_apart_by_the_work_that_they_are_of() -> None:
    found = profiled.by_work(profiled.read_kernels(WRITTEN.read_text().splitlines()), THREE)
    names = {work: [kernel["kernel"] for kernel in kernels] for work, kernels in found.items()}
    assert names["1 behind 8192"] == ["qkv_1", "attention_1", "o_1", "gate_up_1", "down_1"]
    assert names["16 behind 8192"][:3] == ["qkv_16", "qkv_sum_16", "attention_16"]
    assert names["a chunk of 512 behind 0"][:3] == ["chunk_embed", "chunk_norm", "chunk_qkv"]
    with pytest.raises(ValueError, match="zip"):  # works that there are not
        profiled.by_work(profiled.read_kernels(WRITTEN.read_text().splitlines()), WORKS)
    with pytest.raises(ValueError, match="o_1 is no layer's first kernel"):
        profiled.by_work([{"kernel": "o_1"}], THREE)


@pytest.mark.parametrize("old", [False, True])
def test_the_report_gets_them(ncu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    write_ncu(ncu, WRITTEN.read_text(), old=old)
    monkeypatch.setattr(profiled, "WORKS", THREE)
    path = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["profiled.py", "--json", str(path)])
    profiled.main()
    found = json.loads(path.read_text())["profiled"]
    assert list(found) == [work.name for work in THREE] and len(found["a chunk of 512 behind 0"]) == 9
    output = io.StringIO()
    profiled.print_profile(Console(file=output, width=160), found)
    assert "attention_16" in output.getvalue() and "long_scoreboard 4.1" in output.getvalue()


def test_what_ncu_refuses_is_told(ncu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ncu(ncu, "==ERROR== ERR_NVGPUCTRPERM: no permission to access the counters\n", status=1)
    path = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["profiled.py", "--json", str(path)])
    with pytest.raises(SystemExit, match="ncu: ==ERROR== ERR_NVGPUCTRPERM"):
        profiled.main()
    ncu.unlink()
    profiled.main()
    assert json.loads(path.read_text())["skipped"] == ["profiled: Nsight Compute (ncu) is not on this machine"]
