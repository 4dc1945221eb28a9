"""The report as tables, and its figures against the limits. Takes any part of a report: runs end early."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from shapes import MIDDLE, SHAPES

sys.path.insert(0, str(Path(__file__).parent.parent))
from report import Check

FIRST_TOKEN_MS = {"128": (8.0, 5.0), "1024": (30.0, 23.0), "8192": (240.0, 200.0)}  # of 8B: must, goal
FIRST_TOKEN_OF = {  # and of other engines, by model and variant
    ("llama-3.1-8b", "fast"): {128: (7.0, 4.5), 1024: (20.0, 15.0), 8192: (170.0, 140.0)},
    ("llama-3.3-70b", "exact"): {1024: (230.0, 190.0)},
    ("llama-3.3-70b", "fast"): {1024: (140.0, 110.0)},
}
PERSISTENT_CONTEXTS = (128, 8192)  # at which graph + PDL and one kernel for all layers are compared, for T = 1
MICROSECONDS_PER_LAYER = (11.6, 5.0)  # must, goal
DATASHEET = "datasheet"  # where a floor is from, if not from a bandwidth that was measured


def plain(result: dict[str, Any]) -> dict[str, Any] | None:
    """The point of one token at the shortest context."""
    return find(result["points"], 1, 128)


def find(points: list[dict[str, Any]], tree: int, context: int) -> dict[str, Any] | None:
    """The point without the attention for a long cache."""
    narrow = (point for point in points if not point.get("wide"))
    return next((point for point in narrow if (point["tree"], point["context"]) == (tree, context)), None)


def checks(
    shapes: list[dict[str, Any]], client: dict[str, Any] | None, probes: dict[str, Any] | None = None
) -> list[Check]:
    """Every figure of the issue's table that was measured against its limit."""
    rate = (probes or {}).get("products", {}).get("operations_per_s")
    found = []
    for result in shapes:
        arch, base = result["arch"], plain(result)
        if base is None:
            continue
        limit = SHAPES[arch]
        found.append(Check(f"{arch} T=1", base["median_ms"], "ms", limit.must_ms, limit.goal_ms))
        above = base["us_per_layer_above_floor"]
        found.append(Check(f"{arch} above the floor", above, "us per layer", *MICROSECONDS_PER_LAYER))
        found.append(Check(f"{arch} round to round", base["gap_us"]["p50"], "us", 10.0, 2.0))
        for tree, must, goal in ((16, 1.12, 1.05), (64, 1.35, 1.2)):
            if arch == MIDDLE.arch and (share := _of_one_token(result["points"], tree)):
                found.append(Check(f"8B verify T={tree}", share, "x of T=1", must, goal))
            if share := _of_one_token(result.get("by_warps", []), tree):
                found.append(Check(f"{arch} verify T={tree}, by each warp alone", share, "x of T=1", must, goal))
        if one_kernel := find(result.get("persistent", []), 1, 128):
            share = one_kernel["median_ms"] / base["median_ms"]
            found.append(Check(f"{arch} T=1, one kernel for all layers", share, "x of the chain"))
        if drafts := result.get("drafts"):
            share = drafts["busy_us"]["p50"] / 1e3 / base["median_ms"]
            found.append(Check(f"{arch}, {drafts['heads']} Medusa heads", share, "x of T=1"))
    for result in shapes:
        for prompt in prompts_of(result):
            # No limit was set for these: the bars are a client's.
            found.append(Check(f"{result['arch']} {name_of_prompt(prompt)}", prompt["median_ms"], "ms"))
            fast, draws = bool(prompt.get("fast")), bool(prompt.get("draws"))
            way = (prompt.get("behind", 0), prompt["tokens"], prompt["widest"], fast, draws)
            if rate and result["arch"] == MIDDLE.arch and way == (0, 2048, 512, False, False):
                share = prompt["tflop_per_s"] * 1e12 / rate
                found.append(Check("8B prefill of 2048, of the rate of products alone", share, "x", 0.6, 0.8, True))
        for text in result.get("speculation", []):
            name = f"{result['arch']} with EAGLE, acceptance of {text['name']} replayed"
            found.append(Check(name, text["ms_per_token"], "ms per token", text["must_ms"], text["goal_ms"]))
        for first in result.get("first_token", []):
            variant, tokens = first["variant"], first["tokens"]
            limits = FIRST_TOKEN_OF.get((result["arch"], variant), {}).get(tokens, ())
            name = f"{result['arch']}, {variant}, {first['drafter']}: a client's first token behind {tokens}"
            found.append(Check(name, first["p50"], "ms", *limits))
    if client:
        times = client.get("inter_token_us", {})
        if "p99.9" in times:
            found.append(Check("client ITL p99.9 / p50", times["p99.9"] / times["p50"], "x", 1.10, 1.02))
        for tokens, seen in client.get("first_token_ms", {}).items():
            limits = FIRST_TOKEN_MS.get(tokens, ()) if client["arch"] == MIDDLE.arch else ()
            found.append(Check(f"client's first token behind {tokens}", seen["p50"], "ms", *limits))
    return found


def _of_one_token(points: list[dict[str, Any]], tree: int) -> float | None:
    """A tree's round relative to one token's of the same process, both behind 128."""
    point, one = find(points, tree, 128), find(points, 1, 128)
    return point["median_ms"] / one["median_ms"] if point and one else None


def name_of_tree(point: dict[str, Any]) -> str:
    """Its tokens, and whether with the attention for a long cache."""
    return f"T={point['tree']}{', wide' if point.get('wide') else ''}"


def name_of_prompt(prompt: dict[str, Any]) -> str:
    """How it was read."""
    said = "".join(f", {word}" for key, word in (("fast", "fast"), ("draws", "and a draw")) if prompt.get(key))
    behind = f" behind {prompt['behind']}" if prompt.get("behind") else ""
    return f"prefill of {prompt['tokens']}{behind} in parts of {prompt['widest']}{said}"


def prompts_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A model's prompts by what is cached before them, and by their lengths: those that are read fast, the widest
    parts, those without a draw first.
    """
    prompts: list[dict[str, Any]] = result.get("prefill", [])

    def place(prompt: dict[str, Any]) -> tuple[Any, ...]:
        way = (not prompt.get("fast"), -prompt["widest"], bool(prompt.get("draws")))
        return prompt.get("behind", 0), prompt["tokens"], *way

    return sorted(prompts, key=place)


def print_rounds(console: Console, report: dict[str, Any]) -> None:
    """Every point, beside the bandwidth that its floor comes from."""
    for name, value in report.get("read_bandwidth", {}).items():
        console.print(f"read bandwidth by {name}: {value / 1e12:.3f} TB/s")
    if any(point.get("floor_from") == DATASHEET for result in report["shapes"] for point in result["points"]):
        console.print(f"floors by the {DATASHEET}'s bandwidth: none was measured before them")
    table = Table(title="rounds: device time from one round's start to the next one's")
    columns = (
        *("model", "T", "context", "p50 ms", "p99 ms", "mean ms", "weights MB", "KV MB", "floor ms", "of bandwidth"),
        *("us/layer above", "gap us"),
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for result in report["shapes"]:
        for point in sorted(result["points"], key=lambda point: (point["context"], point["tree"])):
            table.add_row(
                result["arch"],
                name_of_tree(point).removeprefix("T="),
                str(point["context"]),
                f"{point['median_ms']:.4f}",
                f"{point['period_us']['p99'] / 1e3:.4f}",
                f"{point['mean_ms_by_events']:.4f}",
                f"{point['weight_bytes'] / 1e6:.0f}",
                f"{point['kv_bytes'] / 1e6:.0f}",
                f"{point['floor_ms']:.4f}",
                f"{point['share_of_read_bandwidth']:.1%}",
                f"{point['us_per_layer_above_floor']:.2f}",
                f"{point['gap_us']['p50']:.2f}",
            )
    console.print(table)
    steps = [point["timer_step_ns"] for result in report["shapes"] for point in result["points"]]
    if seen := [step for step in steps if step is not None]:
        console.print(
            f"smallest step of the device's timer that was seen: {min(seen)} ns; gaps are no finer. Trust the periods "
            "(p50, over many rounds) and the mean between two CUDA events (mean) rather than single gaps"
        )


def print_prompts(console: Console, shapes: list[dict[str, Any]]) -> None:
    """Prompts: the device's time for all passes, and what the memory and the tensor cores had of it."""
    table = Table(title="prefill: device time from the first pass to the end of the last one")
    times = ("p50 ms", "slowest ms", "tokens/s", "read GB", "floor ms", "of bandwidth", "TFLOP/s")
    for column in ("model", "tokens", "behind", "at once", "FP8", "draws", *times):
        table.add_column(column, justify="left" if column == "model" else "right")
    for result in shapes:
        for prompt in prompts_of(result):
            table.add_row(
                result["arch"],
                str(prompt["tokens"]),
                str(prompt.get("behind", 0)),
                str(prompt["widest"]),
                "yes" if prompt.get("fast") else "no",
                "yes" if prompt.get("draws") else "no",
                f"{prompt['median_ms']:.3f}",
                f"{prompt['slowest_ms']:.3f}",
                f"{prompt['tokens_per_s']:,.0f}",
                f"{prompt['bytes'] / 1e9:.1f}",
                f"{prompt['floor_ms']:.3f}",
                f"{prompt['share_of_read_bandwidth']:.1%}",
                f"{prompt['tflop_per_s']:.1f}",
            )
    if table.row_count:
        console.print(table)


def print_trees(console: Console, shapes: list[dict[str, Any]]) -> None:
    """Trees both ways: multiplied by warpgroups, and by each warp alone; each against one token in the same process."""
    table = Table(title="trees: who multiplies")
    for column in ("model", "T", "context", "by", "p50 ms", "p99 ms", "of one token"):
        table.add_column(column, justify="left" if column in ("model", "by") else "right")
    for result in shapes:
        ways = {"warpgroups": result["points"], "warps": result.get("by_warps", [])}
        for compared in ways["warps"]:
            tree, context = compared["tree"], compared["context"]
            for way, points in ways.items():
                point, one = find(points, tree, context), find(points, 1, context)
                if tree == 1 or point is None:
                    continue
                ratio = "" if one is None else f"{point['median_ms'] / one['median_ms']:.3f}"
                times = (f"{point['median_ms']:.4f}", f"{point['period_us']['p99'] / 1e3:.4f}", ratio)
                table.add_row(result["arch"], str(tree), str(context), way, *times)
    if table.row_count:
        console.print(table)


def print_persistent(console: Console, shapes: list[dict[str, Any]]) -> None:
    """Plain rounds both ways: a chain of kernels per layer against one kernel for all."""
    table = Table(title="plain rounds: what the layers are made of")
    for column in ("model", "context", "layers", "p50 ms", "p99 ms", "us/layer above"):
        table.add_column(column, justify="left" if column in ("model", "layers") else "right")
    for result in shapes:
        ways = {"graph + PDL": result["points"], "persistent": result.get("persistent", [])}
        for context in PERSISTENT_CONTEXTS:
            for way, points in ways.items():
                figures = ("not measured", "", "")
                if point := find(points, 1, context):
                    figures = (
                        f"{point['median_ms']:.4f}",
                        f"{point['period_us']['p99'] / 1e3:.4f}",
                        f"{point['us_per_layer_above_floor']:.2f}",
                    )
                table.add_row(result["arch"], str(context), way, *figures)
    console.print(table)
    for result in shapes:
        if compared := result.get("persistent_compared"):
            verdict = {True: "the same bits", False: "DIFFERENT", None: "not compared to the end"}[compared["same"]]
            console.print(
                f"{result['arch']}, one kernel for all layers against the chain, {compared['tokens']} tokens "
                f"({compared['distinct']} distinct): {verdict}"
            )


def print_medusa(console: Console, shapes: list[dict[str, Any]]) -> None:
    """What Medusa heads take before a round."""
    for result in shapes:
        if (drafts := result.get("drafts")) and (base := plain(result)):
            busy, floor = drafts["busy_us"], drafts["floor_us"]
            share = busy["p50"] / 1e3 / base["median_ms"]
            console.print(
                f"{result['arch']}, {drafts['heads']} Medusa heads: p50 {busy['p50']:.1f} us, p99 {busy['p99']:.1f} us "
                f"(floor {floor:.1f} us), {share:.1%} of a plain round"
            )


def print_speculation(console: Console, shapes: list[dict[str, Any]]) -> None:
    """Tokens with an EAGLE head that is right as often as others' heads were, and without it."""
    table = Table(title="with an EAGLE-3 head of random weights, the acceptance of published heads replayed")
    columns = ("model", "text", "tokens/round", "published", "drafted/round", "ms/token", "without", "times faster")
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "text") else "right")
    for result in shapes:
        for text in result.get("speculation", []):
            table.add_row(
                result["arch"],
                f"{text['name']} ({text['source']})",
                f"{text['tokens_per_round']:.2f}",
                f"{text['after_long']:.2f}",
                f"{text['drafted_per_round']:.2f}",
                f"{text['ms_per_token']:.4f}",
                f"{text['ms_per_token_without']:.4f}",
                f"{text['ms_per_token_without'] / text['ms_per_token']:.2f}",
            )
    if table.row_count:
        console.print(table)


def print_first_tokens(console: Console, shapes: list[dict[str, Any]]) -> None:
    """A client's first tokens by how its daemon's engine reads prompts, and who reads them along."""
    table = Table(title="a client's first token")
    for column in ("model", "engine", "drafter", "prompt", "p50 ms", "slowest ms", "prompts"):
        table.add_column(column, justify="left" if column in ("model", "engine", "drafter") else "right")
    for result in shapes:
        for found in result.get("first_token", []):
            about = (result["arch"], found["variant"], found["drafter"], str(found["tokens"]))
            table.add_row(*about, f"{found['p50']:.3f}", f"{found['max']:.3f}", str(found["samples"]))
    if table.row_count:
        console.print(table)


def print_ahead(console: Console, shapes: list[dict[str, Any]]) -> None:
    """Plain rounds by how far L2 is asked for weights ahead (ull/kernels/linear/ahead.cuh)."""
    table = Table(title="weights ahead: KiB that L2 is asked for beyond the rings, for each multiprocessor")
    for column in ("model", "context", "layers", "ahead", "p50 ms", "p99 ms", "mean ms"):
        table.add_column(column, justify="left" if column in ("model", "layers", "ahead") else "right")
    for result in shapes:
        for found in result.get("ahead", []):
            period = found["period_us"]
            times = (f"{value / 1e3:.4f}" for value in (period["p50"], period["p99"], found["mean_us"]))
            layers = "persistent" if found["persistent"] else "graph + PDL"
            table.add_row(result["arch"], str(found["context"]), layers, found["setting"], *times)
    if table.row_count:
        console.print(table)


def print_checks(console: Console, found: list[Check]) -> None:
    table = Table(title="against the limits")
    for column in ("figure", "value", "unit", "must", "goal", ""):
        table.add_column(column)
    for check in found:
        verdict = "" if check.must is None else "[green]ok" if check.ok else "[red]missed"
        limits = ("-" if limit is None else f"{limit:g}" for limit in (check.must, check.goal))
        table.add_row(check.name, f"{check.value:.4g}", check.unit, *limits, verdict)
    console.print(table)


def headline(shapes: list[dict[str, Any]]) -> str:
    """Microseconds per layer above the floor and share of the measured read bandwidth, over all shapes."""
    points = [point for shape in shapes if (point := plain(shape))]
    if not points:
        return "nothing was measured"
    above = statistics.median(point["us_per_layer_above_floor"] for point in points)
    share = statistics.median(point["share_of_read_bandwidth"] for point in points)
    return f"median above the floor: {above:.2f} us per layer, {share:.1%} of read bandwidth"
