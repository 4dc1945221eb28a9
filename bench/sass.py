"""What a kernel's machine code (SASS) says of it: read from nvdisasm's text, without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

PACKAGE = "nvidia-cuda-nvdisasm"

_KERNEL = re.compile(r"^\.text\.(\w+):")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_INSTRUCTION_BYTES = 16

WAIT, BARRIER = "ACQBULK", "BAR."  # griddepcontrol.wait, bar.sync
WARP_MMA, WARPGROUP_MMA = "HMMA", "HGMMA"  # mma.sync, wgmma
MMA = (WARP_MMA, WARPGROUP_MMA)
_FROM_E4M3 = re.compile(r"F2FP\.F16\.E4M3\.UNPACK_B")  # two weights of every lane
_WARP = 32
_A_OPERAND = 16 * 16  # weights of a warp that one mma takes


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    target: str | None = None  # label of a branch
    is_conditional: bool = False


@dataclass
class Code:
    """A kernel's instructions in the order of their addresses, without the padding behind them."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label -> address

    @property
    def nbytes(self) -> int:
        return _INSTRUCTION_BYTES * len(self.instructions)

    def index(self, name: str | tuple[str, ...], start: int = 0) -> int | None:
        """The first instruction of that name, or of one of them, from `start` on."""
        found = (i for i in range(start, len(self.instructions)) if self.instructions[i].name.startswith(name))
        return next(found, None)

    def word_stores(self) -> int:
        """Stores to global memory of four bytes or fewer."""
        stores = [one.name for one in self.instructions if one.name.startswith("STG")]
        return sum(not name.endswith((".64", ".128")) for name in stores)

    def from_wait_to_mma(self) -> tuple[int, int] | None:
        """Instructions, and barriers of the block among them, from griddepcontrol.wait to the first mma behind it.

        In the order of addresses: what is skipped at run time counts, and what is called does not.
        """
        wait = self.index(WAIT)
        mma = None if wait is None else self.index(MMA, wait)
        if wait is None or mma is None:
            return None
        between = self.instructions[wait + 1 : mma]
        return len(between), sum(one.name.startswith(BARRIER) for one in between)

    def loops(self) -> list[list[Instruction]]:
        """Innermost loops with an mma in them: from a conditional backward branch's target to the branch.

        What stands behind the kernel's end and jumps back without a condition is the rare part of some step.
        """
        ranges = set()
        for one in self.instructions:
            if one.is_conditional and one.target in self.labels and self.labels[one.target] <= one.address:
                body = self._between(self.labels[one.target], one.address)
                if any(inner.name.startswith(MMA) for inner in body):
                    ranges.add((self.labels[one.target], one.address))
        innermost = [
            (start, end)
            for start, end in ranges
            if not any((a, b) != (start, end) and start <= a and b <= end for a, b in ranges)
        ]
        return [self._between(start, end) for start, end in sorted(innermost)]

    def _between(self, start: int, end: int) -> list[Instruction]:
        return [one for one in self.instructions if start <= one.address <= end]


@dataclass(frozen=True)
class Loop:
    """An inner loop: a warp's instructions, and the bytes of weights that it multiplies, each time round."""

    instructions: int
    weight_bytes: int

    @property
    def per_byte(self) -> float:
        return self.instructions / self.weight_bytes


def weight_loop(code: Code, token_groups: int) -> Loop | None:
    """The inner loop that multiplies the most weights each time round (others are for what is left over), the dearest
    of such. FP8 weights show by their conversion, once for all tokens; 16-bit ones by the mma, one for each of
    `token_groups` (8 tokens each), or one of a warpgroup for all."""
    found = []
    for body in code.loops():
        converted = 2 * _WARP * sum(bool(_FROM_E4M3.match(one.name)) for one in body)
        mmas, together = (sum(one.name.startswith(name) for one in body) for name in (WARP_MMA, WARPGROUP_MMA))
        sixteen_bits = 2 * _A_OPERAND * mmas // token_groups + 2 * _A_OPERAND * together
        found.append((len(body), converted, sixteen_bits))
    if any(converted for _, converted, _ in found):  # other loops of such a kernel, as attention's, hold no weights
        loops = [Loop(count, converted) for count, converted, _ in found if converted]
    else:
        loops = [Loop(count, nbytes) for count, _, nbytes in found if nbytes]
    return max(loops, key=lambda loop: (loop.weight_bytes, loop.per_byte), default=None)


def parse(text: str) -> dict[str, Code]:
    """Every kernel's code in what `nvdisasm -c` prints."""
    kernels: dict[str, Code] = {}
    code, waiting = Code(), list[str]()
    for line in text.splitlines():
        if match := _KERNEL.match(line):
            code = kernels.setdefault(match[1], Code())
        elif match := _LABEL.match(line):
            waiting.append(match[1])
        elif match := _INSTRUCTION.match(line):
            address = int(match[1], 16)
            code.labels |= dict.fromkeys(waiting, address)
            waiting = []
            target = _TARGET.search(match[4]) if match[3].startswith("BRA") else None
            instruction = Instruction(address, match[3], target[1] if target else None, match[2] is not None)
            code.instructions.append(instruction)
    for code in kernels.values():
        _strip_padding(code)
    return kernels


def _strip_padding(code: Code) -> None:
    """Behind a kernel stand a jump to itself and instructions that do nothing."""
    instructions = code.instructions
    while instructions and instructions[-1].name == "NOP":
        instructions.pop()
    last = instructions[-1] if instructions else None
    if last is not None and last.target is not None and code.labels.get(last.target) == last.address:
        instructions.pop()


def disassemble(cubin: bytes) -> dict[str, Code]:
    """Raises SystemExit where there is no nvdisasm, CalledProcessError where it cannot read the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return parse(_run([str(_nvdisasm()), "-c", file.name]))


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _nvdisasm() -> Path:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed: pip install 'ull[test]'")
    return Path(str(next(file for file in files if file.name == "nvdisasm").locate()))
