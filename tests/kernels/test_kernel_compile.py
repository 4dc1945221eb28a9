"""Every kernel and variant compiles for an H200, with the dimensions of real models, without spills or a stack."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs

import ull
from ull.bundle import (
    CHUNK_KERNELS,
    DEVICE_KERNELS,
    DFLASH_CHUNK_KERNELS,
    DFLASH_CHUNKS,
    DFLASH_KERNELS,
    EAGLE_CHUNK_KERNELS,
    EAGLE_CHUNKS,
    EAGLE_KERNELS,
    HEAD_SCAN_KERNELS,
    MEDUSA_KERNELS,
    PAGES_KERNELS,
    ROUND_KERNELS,
    DflashHead,
    EagleHead,
    Forward,
    MedusaHeads,
    Model,
    Precision,
    Rope,
    Target,
    device_dflash_macros,
    device_eagle_macros,
    device_macros,
)
from ull.errors import BuildError
from ull_build.code import kernels, nvrtc
from ull_build.code.kernels import compile_file, kernel_sources
from ull_build.shapes import shape_model

TINY = Model(
    architecture="llama",
    hidden=256,
    layers=6,
    heads=8,
    kv_heads=2,
    head_dim=32,
    intermediate=640,
    vocabulary=4096,
    tokenizer_vocabulary=4096,
    context=1024,
    rms_epsilon=1e-5,
    tied_embeddings=True,
    qk_norm=False,
    rope=Rope(theta=10000.0),
    windows=[0] * 6,
)
MODELS = {
    "tiny": (TINY, Precision()),
    "llama-3.1-8b, fp8 pages and head": (shape_model("llama-3.1-8b"), Precision(lm_head="fp8", kv="fp8")),
    "qwen3-8b, bf16": (shape_model("qwen3-8b"), Precision(weights="bf16")),
}
MACROS = device_macros(TINY, Precision())
TOGETHER = Forward(tree_products="warpgroup")  # as engines for an H200 are
SCAN_SOURCES = sorted(set(kernel_sources(HEAD_SCAN_KERNELS)) - set(kernel_sources(ROUND_KERNELS)))
CHUNK_SOURCES = sorted(set(kernel_sources(CHUNK_KERNELS)) - set(kernel_sources(ROUND_KERNELS)))
LARGE = {"llama-3.3-70b": (shape_model("llama-3.3-70b"), Precision(kv="fp8"))}  # of what its shape changes most
_TREES = ("attention", "down", "gate_up", "head", "norm", "output", "qkv")  # what of them the products of trees change
TREE_SOURCES = [source for source in kernel_sources() if source.stem in _TREES]
MEDUSA_SOURCES = sorted(set(kernel_sources(MEDUSA_KERNELS)) - set(kernel_sources(ROUND_KERNELS)))


_BOUNDS = re.compile(r"\.maxntid (\d+)(?:.*\n)*?\.minnctapersm (\d+)")


def assert_products_stay_in_flight(compiled: nvrtc.Compiled, or_wait: bool = False) -> None:
    """The assembler says where it waits for each product (C7510 ..), unless `or_wait`, or ignores setmaxnreg (C7508).

    What warpgroups then share out anew are the registers of a launch: as many as its bounds leave each thread.
    """
    assert or_wait or "serialized" not in compiled.log
    assert "setmaxnreg" not in compiled.log
    for entry in compiled.ptx.split(".entry ")[1:]:
        if "setmaxnreg" in entry:
            threads, blocks = map(int, _BOUNDS.search(entry).groups())
            assert compiled.functions[entry.partition("(")[0]].registers == 65536 // (threads * blocks) // 8 * 8


@pytest.mark.skipif("ULL_NVRTC" not in os.environ, reason="`make oldest-nvrtc` asks for one")
def test_the_compiler_is_the_one_that_was_asked_for() -> None:
    assert ".".join(map(str, nvrtc.version())) == os.environ["ULL_NVRTC"]


@pytest.mark.parametrize("source", kernel_sources(DEVICE_KERNELS | PAGES_KERNELS), ids=lambda path: path.name)
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_compiles_without_spills(name: str, source: Path) -> None:
    compiled = compile_file(source, device_macros(*MODELS[name], forward=TOGETHER))
    assert compiled.cubin.startswith(b"\x7fELF")
    for kernel in compiled.kernels:
        use = compiled.functions[kernel]
        assert (use.stack, use.spills) == (0, 0) and 0 < use.registers <= 255
    assert_products_stay_in_flight(compiled, or_wait=name == "tiny")  # slices of odd lengths have branches among them


@pytest.mark.parametrize("source", [*TREE_SOURCES, *kernel_sources(PAGES_KERNELS)], ids=lambda path: path.name)
@pytest.mark.parametrize("name", LARGE)
def test_trees_of_a_large_model_compile_without_spills(name: str, source: Path) -> None:
    compiled = compile_file(source, device_macros(*LARGE[name], forward=TOGETHER))
    assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())
    assert_products_stay_in_flight(compiled)


@pytest.mark.parametrize("source", TREE_SOURCES, ids=lambda path: path.name)
def test_trees_of_warps_compile_without_spills(source: Path) -> None:
    """As draft models and heads have them, and engines beside plans."""
    compiled = compile_file(source, device_macros(*MODELS["llama-3.1-8b, fp8 pages and head"]))
    assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())
    assert "wgmma" not in compiled.ptx


@pytest.mark.parametrize("source", CHUNK_SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("name", MODELS | LARGE)
def test_a_chunks_products_stay_in_flight(name: str, source: Path) -> None:
    """And no spills."""
    compiled = compile_file(source, device_macros(*(MODELS | LARGE)[name]))
    assert set(compiled.kernels) <= CHUNK_KERNELS
    assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())
    assert_products_stay_in_flight(compiled)


@pytest.mark.parametrize("source", CHUNK_SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("arch", ["llama-3.2-1b", "llama-3.1-8b", "qwen3-8b", "llama-3.3-70b"])
def test_kernels_of_fast_prefill_compile_without_spills(arch: str, source: Path) -> None:
    compiled = compile_file(
        source, device_macros(shape_model(arch), Precision(kv="fp8"), forward=Forward(prefill="fast"))
    )
    assert set(compiled.kernels) <= CHUNK_KERNELS
    assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())
    assert_products_stay_in_flight(compiled)
    if source.stem == "chunk_linear":
        assert "e4m3.e4m3" in compiled.ptx and "f32.f16.f16" not in compiled.ptx


HEADS = {
    "three of their own lm_heads": (MedusaHeads(heads=3, layers=1, version="1"), "fp8"),
    "eight of the model's": (MedusaHeads(heads=8, layers=2, version="2"), "bf16"),
}


@pytest.mark.parametrize("source", MEDUSA_SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("arch", ["llama-3.1-8b", "llama-3.3-70b"])
@pytest.mark.parametrize("name", HEADS)
def test_medusa_heads_compile_without_spills(name: str, arch: str, source: Path) -> None:
    medusa, weights = HEADS[name]
    compiled = compile_file(source, device_macros(shape_model(arch), Precision(weights=weights), medusa))
    assert set(compiled.kernels) <= MEDUSA_KERNELS
    assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())


@pytest.mark.parametrize("source", SCAN_SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("arch", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.3-70b"])
def test_the_scan_of_the_lm_head_compiles_without_spills(arch: str, source: Path) -> None:
    """And leaves registers for a second block, its own or the next kernel's."""
    compiled = compile_file(source, device_macros(shape_model(arch), Precision(lm_head_scan=True)))
    assert set(compiled.kernels) <= HEAD_SCAN_KERNELS
    assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())
    assert all(use.registers <= 128 for use in compiled.functions.values())


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("arch", ["llama-3.2-1b", "llama-3.1-8b", "qwen3-8b", "llama-3.3-70b"])
def test_all_layers_in_one_kernel_leave_registers_over(arch: str, kv: Literal["bf16", "fp8"]) -> None:
    """It needs more than any other, and what it needs depends on the shape."""
    compiled = compile_file(
        kernels.SOURCES / "persistent/layers.cu", device_macros(shape_model(arch), Precision(kv=kv))
    )
    use = compiled.functions["ull_layers_1"]
    assert (use.stack, use.spills) == (0, 0) and use.registers < 255


def eagle_head(arch: str, **changes: Any) -> EagleHead:
    """A head as the wild ones of these targets are."""
    model = structs.replace(shape_model(arch), layers=1, windows=[0], vocabulary=32000, tokenizer_vocabulary=32000)
    return EagleHead(model=model, precision=Precision(lm_head="fp8"), taps=[2, 16, 29], mapped=True, **changes)


EAGLES: dict[str, dict[str, Any]] = {
    "eagle 3": {},
    "eagle 3.1": {"tap_norm": "each", "norm_output": True},
    "others": {"tap_norm": "all", "norm_before_residual": True},
}


@pytest.mark.parametrize("name", EAGLES)
@pytest.mark.parametrize("arch", ["llama-3.2-1b", "llama-3.1-8b", "llama-3.3-70b"])
def test_eagle_heads_compile_without_spills(arch: str, name: str) -> None:
    """What is their own, and what of the others' kernels looks different with their macros."""
    macros = device_eagle_macros(eagle_head(arch, **EAGLES[name]), shape_model(arch).hidden)
    others = [] if name != "eagle 3" else ["linear/head.cu", "chunk/chunk_store.cu"]
    for source in ["eagle/eagle.cu", "eagle/eagle_rank.cu", "eagle/eagle_chunk.cu", *others]:
        compiled = compile_file(kernels.SOURCES / source, macros)
        assert source in others or set(compiled.kernels) <= EAGLE_KERNELS | EAGLE_CHUNK_KERNELS
        assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())
        assert_products_stay_in_flight(compiled)


DFLASHES: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash, its own lm_head": {"own_lm_head": True, "mapped": True},
    "dspark": {"anchor_predicts": True, "markov": 256, "confidence": True, "confidence_reads_markov": True},
    "dspark, gated": {"markov": 256, "markov_kind": "gated", "confidence": True},
}


def dflash_macros(arch: str, **changes: Any) -> dict[str, str]:
    """Of a head as the wild ones of these targets are."""
    target = TINY if arch == "tiny" else shape_model(arch)
    vocabulary = 32000 if "mapped" in changes else target.vocabulary
    model = structs.replace(
        target, layers=5, windows=[0] * 5, vocabulary=vocabulary, tokenizer_vocabulary=vocabulary, qk_norm=True
    )
    head = DflashHead(model=model, precision=Precision(), taps=[1, 2, 4, 5, 6], block=16, mask_token=5, **changes)
    return device_dflash_macros(head, target.hidden, Precision())


@pytest.mark.parametrize("name", DFLASHES)
@pytest.mark.parametrize("arch", ["tiny", "llama-3.1-8b"])
def test_dflash_heads_compile_without_spills(arch: str, name: str) -> None:
    """What is their own, and the attention whose entries see each other."""
    macros = dflash_macros(arch, **DFLASHES[name])
    sources = [f"dflash/{part}.cu" for part in ("dflash", "dflash_nodes", "dflash_rank", "dflash_chunk")]
    others = [] if name != "dflash" else ["attention/attention.cu", "chunk/chunk_norm.cu", "chunk/chunk_store.cu"]
    for source in [*sources, *others]:
        compiled = compile_file(kernels.SOURCES / source, macros)
        assert source in others or set(compiled.kernels) <= DFLASH_KERNELS | DFLASH_CHUNK_KERNELS
        assert all((use.stack, use.spills) == (0, 0) for use in compiled.functions.values())
        assert_products_stay_in_flight(compiled)


TAPPING = [f"{name}.cu" for name in ("norm", "qkv", "head", "head_scan", "layers", "commit")]


@pytest.mark.parametrize("name", TAPPING)
@pytest.mark.parametrize("arch", ["llama-3.1-8b", "llama-3.3-70b"])
def test_kernels_that_keep_hidden_states_compile_without_spills(arch: str, name: str) -> None:
    """And leave registers for as many blocks as without."""
    precision = Precision(lm_head_scan=True)
    (source,) = kernels.SOURCES.rglob(name)
    plain, tapping = (compile_file(source, device_macros(shape_model(arch), precision, taps=taps)) for taps in (0, 3))
    for kernel, use in tapping.functions.items():
        assert (use.stack, use.spills) == (0, 0)
        assert use.registers <= max(128, plain.functions[kernel].registers)


OTHER_TARGETS: list[tuple[Target, Path]] = [
    *(("sm_100a", source) for source in kernel_sources()),
    *(("sm_89", source) for source in kernel_sources(ROUND_KERNELS)),
]


@pytest.mark.parametrize(("target", "source"), OTHER_TARGETS, ids=lambda item: getattr(item, "name", item))
def test_other_architectures_compile(target: Target, source: Path) -> None:
    """Without spills, where our kernels of the layers run too."""
    assert compile_file(source, device_macros(shape_model("llama-3.1-8b"), Precision()), target).kernels


def test_the_sources_hold_every_kernel_of_a_round() -> None:
    """By their text: the build makes sure once more of what the compiler saw."""
    needed = DEVICE_KERNELS | PAGES_KERNELS | MEDUSA_KERNELS | HEAD_SCAN_KERNELS | EAGLE_KERNELS | DFLASH_KERNELS
    needed |= CHUNK_KERNELS | EAGLE_CHUNKS | DFLASH_CHUNKS
    text = "\n".join(source.read_text() for source in kernel_sources(needed))
    assert not [kernel for kernel in needed if f"({kernel}," not in text]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for kernels of a test's own, which may include the real headers."""
    assert not list(tmp_path.iterdir())
    return tmp_path


def source(folder: Path, body: str, launch_bounds: str = "256, 1") -> Path:
    path = folder / "sample.cu"
    bounds = f"__launch_bounds__({launch_bounds})"
    path.write_text(f'extern "C" __global__ void {bounds} ull_sample(float* p, int n) {{ {body} }}\n')
    return path


def test_a_kernel_that_spills_is_refused(folder: Path) -> None:
    body = """
      float a[64];
      #pragma unroll
      for (int i = 0; i < 64; ++i) a[i] = p[i * n];
      for (int r = 0; r < n; ++r) {
        #pragma unroll
        for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i * 7 + 1) % 64] + p[r];
      }
      #pragma unroll
      for (int i = 0; i < 64; ++i) p[i * n] = a[i];"""
    with pytest.raises(BuildError, match=r"sample\.cu: ull_sample needs \d+ bytes of stack and spills [1-9]\d* bytes"):
        compile_file(source(folder, body, "1024, 2"), {})
    compile_file(source(folder, body, "128, 1"), {})  # with registers enough, it is fine


def test_a_kernel_with_a_stack_is_refused(folder: Path) -> None:
    body = """
      float a[64];
      for (int i = 0; i < 64; ++i) a[i] = p[i];
      for (int i = 0; i < n; ++i) a[a[i] > 0.0F ? i % 64 : (i * n) % 64] += a[(i * 3) % 64];
      p[0] = a[n % 64];"""
    with pytest.raises(BuildError, match=r"ull_sample needs [1-9]\d* bytes of stack and spills 0 bytes"):
        compile_file(source(folder, body), {})


def test_an_error_names_file_and_line(folder: Path) -> None:
    with pytest.raises(BuildError, match=r"sample\.cu does not compile: sample\.cu\(1\): error: .*\"nothing\""):
        compile_file(source(folder, "nothing();"), {})
    with pytest.raises(BuildError, match="holds no kernel"):
        path = folder / "empty.cu"
        path.write_text("namespace ull {}\n")
        compile_file(path, {})


def test_macros_and_headers_reach_the_source(folder: Path) -> None:
    (folder / "part.cuh").write_text('#pragma once\n#include "base/philox.h"\n#define TWICE (2 * ULL_HIDDEN)\n')
    path = source(folder, "static_assert(TWICE == 512); p[0] = ull::philox4x32({{1, 2, 3, 4}}, 5, 6).word[0];")
    path.write_text('#include <cstdint>\n#include "part.cuh"\n' + path.read_text())
    assert compile_file(path, MACROS).kernels == ["ull_sample"]


def test_sources_that_were_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SOURCES", folder)
    with pytest.raises(BuildError, match="holds no kernel sources; reinstall ull"):
        kernels.compile_kernels(MACROS)


def test_the_kernels_need_nothing_but_what_a_wheel_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel leaves ull/native out, but for ull/native/base/*.h."""
    installed = Path(ull.__file__).parent
    shutil.copytree(installed / "kernels", folder / "kernels")
    (folder / "native/base").mkdir(parents=True)
    for header in (installed / "native/base").glob("*.h"):
        shutil.copy(header, folder / "native/base")
    monkeypatch.setattr(kernels, "INCLUDE_DIRECTORIES", (folder / "kernels", folder / "native"))
    for path in sorted((folder / "kernels").rglob("*.cu")):
        wanted = kernels._headers(path.read_text(), path.parent)
        found = {name for text in (path.read_text(), *wanted.values()) for name in kernels._INCLUDE.findall(text)}
        assert found - set(wanted) <= {"emulated_arch.h"}, path.name


def test_the_log_is_read_by_function() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'ull_a' for 'sm_90a'
ptxas info    : Function properties for ull_a
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 31 registers, used 0 barriers
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""
    functions = nvrtc.parse_log(log)
    assert functions["ull_a"] == nvrtc.FunctionUse(0, 0, 31, True)
    assert functions["helper"] == nvrtc.FunctionUse(16, 12, 0, False)
