"""A trace as a picture: a lane for each party, time from left to right. Needs Pillow (the extra `ops`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ull.errors import UsageError
from ull.trace.chrome import first_ns
from ull.trace.collect import Kind, Trace

if TYPE_CHECKING:
    from PIL import ImageDraw

_MISSING = "a picture needs the extra `ops`: pip install 'ull[ops]' (there is no module PIL)"
_WIDTH, _LANE, _LEFT, _TOP, _BAR = 1600, 34, 210, 46, 20  # pixels
_INK, _GRID, _PAPER = "#1c1e21", "#d8dadd", "#ffffff"
_COLOURS = {
    "admission": "#b8b8b8",
    "queue": "#e6c229",
    "prefill": "#2f80ed",
    "first round": "#8e5bd6",
    "decode": "#27ae60",
    "round": "#27ae60",
    "score": "#8e5bd6",
    "frame": "#eb5757",
    "client": "#4f4f4f",
}
_MOST_REQUESTS = 24  # lanes; of more the last


class _Bar(NamedTuple):
    lane: int
    begin_ns: int
    end_ns: int
    colour: str


def draw(trace: Trace, path: Path) -> None:
    """Writes the PNG. Raises UsageError where Pillow is missing, or there is nothing to draw."""
    try:
        from PIL import Image, ImageDraw
    except ModuleNotFoundError:
        raise UsageError(_MISSING) from None
    lanes, bars = _lay_out(trace)
    if not bars:
        raise UsageError("the trace is empty: nothing was asked of the daemon meanwhile")
    origin, end = first_ns(trace), max(bar.end_ns for bar in bars)
    image = Image.new("RGB", (_WIDTH, _TOP + _LANE * len(lanes) + 30), _PAPER)
    pen = ImageDraw.Draw(image)
    scale = (_WIDTH - _LEFT - 20) / max(1, end - origin)
    _draw_grid(pen, (end - origin) / 1e6, image.height)
    for lane, name in enumerate(lanes):
        pen.text((8, _TOP + _LANE * lane + 6), name[:32], fill=_INK)
    for bar in bars:
        left = _LEFT + (bar.begin_ns - origin) * scale
        right = max(left + 1, _LEFT + (bar.end_ns - origin) * scale)
        top = _TOP + _LANE * bar.lane + 4
        pen.rectangle((left, top, right, top + _BAR), fill=bar.colour)
    _draw_legend(pen, image.height)
    image.save(path, format="PNG")


def _lay_out(trace: Trace) -> tuple[list[str], list[_Bar]]:
    lanes: list[str] = []
    bars: list[_Bar] = []
    for stamps in trace.clients:
        lanes.append(f"client of request {stamps.request}")
        bars.append(_Bar(len(lanes) - 1, stamps.sent_ns, stamps.sent_ns, _COLOURS["client"]))
        bars += [_Bar(len(lanes) - 1, at, at, _COLOURS["client"]) for at, _ in stamps.received]
    for request in trace.requests[-_MOST_REQUESTS:]:
        lanes.append(f"request {request.request}, {request.finish_reason}")
        for name, begin_ns, end_ns in request.timeline.stages():
            bars.append(_Bar(len(lanes) - 1, begin_ns, end_ns, _COLOURS[name]))
    for name, kinds in (
        ("engine thread", (Kind.PREFILL, Kind.ROUND, Kind.SCORE)),
        ("io thread, frames", (Kind.FRAME,)),
    ):
        lanes.append(name)
        for record in trace.records:
            if record.kind in kinds:
                bars.append(_Bar(len(lanes) - 1, record.begin_ns, record.end_ns, _COLOURS[record.kind.name.lower()]))
    return lanes, bars


def _draw_grid(pen: ImageDraw.ImageDraw, length_ms: float, height: int) -> None:
    step = next(step for step in _steps() if length_ms / step <= 12)
    at = 0.0
    while at <= length_ms:
        x = _LEFT + (_WIDTH - _LEFT - 20) * at / max(length_ms, 1e-9)
        pen.line((x, _TOP - 8, x, height - 26), fill=_GRID)
        pen.text((x + 2, _TOP - 24), f"{at:g} ms", fill=_INK)
        at = round(at + step, 9)


def _steps() -> Iterator[float]:
    """Round numbers, ascending."""
    power = 0.001
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _draw_legend(pen: ImageDraw.ImageDraw, height: int) -> None:
    x = _LEFT
    for name in ("admission", "queue", "prefill", "first round", "decode", "frame"):
        pen.rectangle((x, height - 20, x + 12, height - 8), fill=_COLOURS[name])
        pen.text((x + 18, height - 20), name, fill=_INK)
        x += 140
