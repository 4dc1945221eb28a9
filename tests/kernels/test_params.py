"""The ctypes mirrors of ull/gpu/params.py against the C++ structs and constants of ull/kernels/params.h."""

import ctypes
import hashlib
import inspect
import subprocess
from pathlib import Path

import pytest

from ull.bundle import DEVICE_INTERFACE
from ull.gpu import params

ROOT = Path(__file__).parents[2]
STRUCTS = {
    name: struct
    for name, struct in inspect.getmembers(params, inspect.isclass)
    if issubclass(struct, ctypes.Structure) and struct is not ctypes.Structure
}
CONSTANTS = {  # Python's name: C++'s
    "INTERFACE": "kInterface",
    "AWAITED": "kAwaited",
    "TREE_TOKENS": "kTreeTokens",
    "ROUND_SLOTS": "kRoundSlots",
    "STOP_TOKENS": "kStopTokens",
    "BIASES": "kBiases",
    "ALTERNATIVES": "kAlternatives",
    "MEDUSA_RANKS": "kMedusaRanks",
    "PAGE_TOKENS": "kPageTokens",
    "MASK_TOKENS": "kMaskTokens",
    "SPLIT_TOKENS": "kSplitTokens",
    "SLICES": "kSlices",
    "TAP_SLOTS": "kTapSlots",
    "CHUNK_TOKENS": "kChunkTokens",
    "CHUNK_PARTS": "kChunkParts",
    "CHUNK_TILE": "kChunkTile",
    "MOST_TAPS": "kMostTaps",
    "MLP_SCALE": "kMlpScale",
    "LAYER_LINEARS": "kLayerLinears",
    "PROMPTED": "kPrompted",
    "GENERATED": "kGenerated",
    "TAKE": "RoundMode::kTake",
    "CONTINUE": "RoundMode::kContinue",
    "PREFILL": "RoundMode::kPrefill",
    "MEDUSA": "RoundMode::kMedusa",
    "REDRAW": "RoundMode::kRedraw",
    "EAGLE": "RoundMode::kEagle",
    "DFLASH_CONTEXT": "RoundMode::kDflashContext",
    "DFLASH_BLOCK": "RoundMode::kDflashBlock",
    "DFLASH_NODES": "RoundMode::kDflashNodes",
    "OK": "RoundStatus::kOk",
    "SKIPPED": "RoundStatus::kSkipped",
    "NOT_FINITE": "RoundStatus::kNotFinite",
}


def fields(struct: type[ctypes.Structure]) -> list[str]:
    """The fields that C++ names too; `tail` is what the compiler adds there."""
    return [field[0] for field in struct._fields_ if field[0] != "tail"]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a C++ program says of every struct, field and constant."""
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'std::cout << "{name} " << sizeof({name}) << "\\n";')
        # A mirror that leaves a field out changes no offset of the others if it sits in padding: structured bindings
        # refuse a wrong count.
        bound = ", ".join(f"f{i}" for i in range(len(fields(struct))))
        lines.append(f"{{ {name} value{{}}; auto& [{bound}] = value; }}")
        for field in fields(struct):
            member = f"{name}::{field}"
            lines.append(
                f'std::cout << "{name}.{field} " << offsetof({name}, {field}) << "," << sizeof({member}) << "\\n";'
            )
    for name, constant in CONSTANTS.items():
        lines.append(f'std::cout << "{name} " << static_cast<double>({constant}) << "\\n";')
    folder = tmp_path_factory.mktemp("params")
    source = folder / "params.cpp"
    body = "\n  ".join(lines)
    source.write_text(
        '#include <cstddef>\n#include <iostream>\n#include "params.h"\nusing namespace ull::gpu;\n'
        f"int main() {{\n  std::cout.precision(17);\n  {body}\n}}\n"
    )
    program = folder / "params"
    command = ["g++", "-std=c++20", "-w", f"-I{ROOT / 'ull/kernels'}", str(source), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ", 1) for line in output.splitlines())


@pytest.mark.parametrize("name", STRUCTS)
def test_struct(native: dict[str, str], name: str) -> None:
    struct = STRUCTS[name]
    actual = {field: f"{getattr(struct, field).offset},{getattr(struct, field).size}" for field in fields(struct)}
    expected = {field: native[f"{name}.{field}"] for field in fields(struct)}
    assert actual == expected
    assert ctypes.sizeof(struct) == int(native[name])


def test_every_struct_has_its_mirror() -> None:
    source = (ROOT / "ull/kernels/params.h").read_text()
    declared = {
        line.removesuffix("{").split("//")[0].split("{")[0].split()[-1]
        for line in source.splitlines()
        if line.startswith("struct ")
    }
    assert declared == set(STRUCTS)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant(native: dict[str, str], name: str) -> None:
    assert float(native[name]) == getattr(params, name)


def test_a_change_of_what_host_and_kernels_share_raises_the_interface() -> None:
    """Cubins of older bundles go by what was here then: they must be refused, not run. Raise all three, and say so."""
    layout = [
        (name, ctypes.sizeof(struct), [(field, getattr(struct, field).offset, getattr(struct, field).size)])
        for name, struct in sorted(STRUCTS.items())
        for field in fields(struct)
    ]
    constants = [(name, getattr(params, name)) for name in sorted(CONSTANTS) if name != "INTERFACE"]
    digest = hashlib.sha256(repr((layout, constants)).encode()).hexdigest()[:16]
    assert (params.INTERFACE, DEVICE_INTERFACE) == (16, 16)
    assert digest == "295deef0c9ef777a"
