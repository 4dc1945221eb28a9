"""A traced round as pictures: a Chrome trace, and a PNG that needs nothing but NumPy and zlib."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARKS = ("start", "filled", "waited", "first used", "last used", "end")  # of trace.cuh
START, FILLED, WAITED, FIRST, LAST, END = range(6)
PHASES = (  # from one mark to another, where both are there
    ("fills its ring", START, FILLED),
    ("waits for its predecessor", FILLED, WAITED),
    ("waits for its predecessor", START, WAITED),
    ("prepares", WAITED, FIRST),
    ("streams", FIRST, LAST),
    ("finishes", LAST, END),
)


@dataclass(frozen=True)
class Block:
    """One block of one launch; times in microseconds from the round's first start, NaN where they do not apply."""

    kernel: str
    launch: int  # of that kernel in the round, from 0
    block: int
    multiprocessor: int
    us: tuple[float, ...]  # by mark


def lanes(blocks: Sequence[Block]) -> list[int]:
    """Which of its multiprocessor's rows each block stands in, so that none covers another."""
    free: dict[int, list[float]] = {}
    chosen = [0] * len(blocks)
    for index in sorted(range(len(blocks)), key=lambda index: blocks[index].us[START]):
        block = blocks[index]
        rows = free.setdefault(block.multiprocessor, [])
        row = next((row for row, end in enumerate(rows) if end <= block.us[START]), len(rows))
        rows[row : row + 1] = [block.us[END]]
        chosen[index] = row
    return chosen


def chrome_events(blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """Complete events: a process for each multiprocessor, a block's phases within the block."""
    for number in sorted({block.multiprocessor for block in blocks}):
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"multiprocessor {number}"}}
    for block, row in zip(blocks, lanes(blocks), strict=True):
        place = {"ph": "X", "pid": block.multiprocessor, "tid": row}
        name = f"{block.kernel} {block.launch}"
        start, end = block.us[START], block.us[END]
        yield {**place, "name": name, "ts": start, "dur": end - start, "args": {"block": block.block}}
        has_ring = not np.isnan(block.us[FILLED])
        for phase, first, last in PHASES:
            times = block.us[first], block.us[last]
            if not np.isnan(times).any() and (first, last) != ((START, WAITED) if has_ring else None):
                yield {**place, "name": phase, "ts": times[0], "dur": max(0.0, times[1] - times[0])}


def write_chrome_trace(blocks: Sequence[Block], path: Path) -> None:
    """Opens in Perfetto and chrome://tracing; gzip, as both take it."""
    text = json.dumps({"displayTimeUnit": "ns", "traceEvents": list(chrome_events(blocks))}, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 6))


# ---- the PNG --------------------------------------------------------------------------------------------------------

WIDTH, MARGIN, HEAD, ROW = 1800, 60, 60, 3  # pixels
COLOURS = (
    *((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40)),
    *((148, 103, 189), (140, 86, 75), (227, 119, 194), (188, 189, 34)),
)
OTHERS = (90, 90, 90)
SHADES = ((START, WAITED, 0.3), (WAITED, FIRST, 0.6), (WAITED, END, 1.0), (FIRST, END, 1.0))  # later ones on top

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz_./-"
_DOTS = (  # of each letter: 3 x 5 pixels, an octal digit a row
    "75557 26227 71747 71717 55711 74717 74757 71111 75757 75717 "
    "25755 65656 34443 65556 74747 74744 34553 55755 72227 11152 55655 44447 57755 "
    "65555 25552 65644 25573 65655 34216 72222 55557 55552 55775 55255 55222 71247 00007 00002 11244 00700"
)
_GLYPHS = dict(zip(_LETTERS, _DOTS.split(), strict=True))


def draw_timeline(blocks: Sequence[Block], begin_us: float, end_us: float) -> NDArray[np.uint8]:
    """[height, WIDTH, 3]: a multiprocessor's blocks in two rows or more, paler while they wait."""
    rows = lanes(blocks)
    deep = max(rows, default=0) + 1
    numbers = sorted({block.multiprocessor for block in blocks})
    top = {number: HEAD + index * (deep * ROW + 1) for index, number in enumerate(numbers)}
    image = np.full((HEAD + len(numbers) * (deep * ROW + 1) + 30, WIDTH, 3), 255, np.uint8)
    scale = (WIDTH - 2 * MARGIN) / (end_us - begin_us)
    shown = [
        (block, row)
        for block, row in zip(blocks, rows, strict=True)
        if block.us[END] > begin_us and block.us[START] < end_us
    ]
    names = list(dict.fromkeys(block.kernel for block, _ in sorted(shown, key=lambda item: item[0].us[WAITED])))
    colours = {name: COLOURS[index] if index < len(COLOURS) else OTHERS for index, name in enumerate(names)}
    for block, row in shown:
        y = top[block.multiprocessor] + row * ROW
        for first, last, strength in SHADES:
            if not np.isnan([block.us[first], block.us[last]]).any():
                x = [
                    MARGIN + round((min(max(at, begin_us), end_us) - begin_us) * scale)
                    for at in (block.us[first], block.us[last])
                ]
                colour = 255 - (255 - np.array(colours[block.kernel])) * strength
                image[y : y + ROW, x[0] : max(x[1], x[0] + 1)] = colour.astype(np.uint8)
    x = MARGIN
    for name in names:
        image[12:22, x : x + 10] = colours[name]
        x = write_text(image, x + 14, 12, name) + 24
    step = _round_step((end_us - begin_us) / 10)
    for tick in np.arange(np.ceil(begin_us / step) * step, end_us, step):
        at = MARGIN + round((tick - begin_us) * scale)
        image[HEAD - 6 : HEAD - 2, at] = 0
        write_text(image, at + 3, HEAD - 20, f"{tick:.4g}")
    write_text(image, WIDTH - MARGIN + 8, HEAD - 20, "us")
    for number in numbers[:: max(-(-8 // (deep * ROW + 1)), len(numbers) // 16)]:
        write_text(image, 8, top[number], f"sm {number}", 1)
    return image


def _round_step(least: float) -> float:
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least))


def write_text(image: NDArray[np.uint8], x: int, y: int, text: str, size: int = 2) -> int:
    """Writes into the image, as far as it reaches; where the text ends."""
    for letter in text.lower():
        for line, digit in enumerate(_GLYPHS.get(letter, "00000")):
            for column in range(3):
                if int(digit) >> (2 - column) & 1:
                    at = y + line * size, x + column * size
                    image[at[0] : at[0] + size, at[1] : at[1] + size] = 0
        x += 4 * size
    return x


def png(image: NDArray[np.uint8]) -> bytes:
    """8-bit RGB, without filters."""
    height, width, _ = image.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, 3 * width)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(lines.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
