"""`ull bench`: measures a running daemon from the client's side, as a table and as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ull import __version__
from ull.client import Client
from ull.client.benchmark import QUANTILES, Load, measure
from ull.commands.connection import client_of
from ull.commands.flags import add_options
from ull.commands.report_file import ReportFile
from ull.errors import ConfigError

DEFAULT_PROMPT = "def main() -> None:\n    "
_ROWS = (
    ("time_to_first_token_us", "TTFT"),
    ("inter_token_us", "ITL"),
    ("inter_chunk_us", "inter-chunk"),
    ("end_to_end_us", "end to end"),
    ("send_delay_us", "sent late by"),
)
_DEADLINE_ROWS = (("first_token_error_us", "first token predicted off by"), ("done_error_us", "end predicted off by"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull bench`."""
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="the prompt of every request")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="instead: N token ids, different every run")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="measured requests (default 100)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="requests before them (default 5)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy (default)")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="closed loop: requests at once")
    parser.add_argument("--rate", type=float, metavar="X", help="open loop: X requests per second, at planned times")
    parser.add_argument("--even", action="store_true", help="open loop: even gaps instead of Poisson arrivals")
    parser.add_argument("--deadline", type=float, metavar="MS", help="of every request: how many meet it")
    add_options(parser, {"speculate", "max_tree", "priority"})
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or print only JSON")


def run(options: argparse.Namespace) -> int:
    """Runs `ull bench`."""
    if options.requests < 1 or options.warmup < 0 or options.concurrency < 1:
        raise ConfigError("--requests and --concurrency must be at least 1, --warmup at least 0")
    if options.rate is not None and not 0 < options.rate < 1e6:
        raise ConfigError(f"--rate must be a positive number of requests per second, not {options.rate}")
    if options.deadline is not None and not 1 <= options.deadline < 1e8:
        raise ConfigError(f"--deadline must be a number of milliseconds, 1 or more, not {options.deadline}")
    report_file = None if options.json in (None, "-") else ReportFile(Path(options.json), "json")
    with report_file or contextlib.nullcontext(), client_of(options) as client:
        report = _measure(client, options)
        url = client.url
        if report_file is not None:
            report_file.write(json.dumps(report, indent=2) + "\n")
    if options.json == "-":
        print(json.dumps(report, indent=2))
        return 0
    environment = report["environment"]
    print_table(report["summary"], f"{environment['engine']} at {url}, {environment['executor']}")
    return 0


def _measure(client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load that the options ask for; returns the report."""
    info = client.info()
    prompt: str | list[int] = options.prompt
    if options.prompt_tokens is not None:
        vocabulary = int(info.limits["vocabulary"])
        prompt = [1 + (index * 7919) % (vocabulary - 1) for index in range(options.prompt_tokens)]
    load = Load(
        prompt=prompt,
        max_tokens=options.max_tokens,
        requests=options.requests,
        warmup=options.warmup,
        temperature=options.temperature,
        concurrency=options.concurrency,
        rate=options.rate,
        poisson=not options.even,
        speculate=options.speculate,
        max_tree=options.max_tree,
        priority=options.priority,
        deadline=None if options.deadline is None else options.deadline / 1000,
    )
    samples = measure(client, load)
    return {
        "environment": _environment(client.url, info.engine, info.executor),
        "load": {
            "rate": load.rate,
            "concurrency": load.concurrency,
            "max_tokens": load.max_tokens,
            "temperature": load.temperature,
            "speculate": load.speculate or info.limits["default_drafter"],
            "max_tree": load.max_tree,
            "priority": load.priority,
            "deadline_ms": options.deadline,
        },
        "summary": samples.summary(),
    }


def print_table(summary: dict[str, Any], title: str) -> None:
    """A line per metric, a column per quantile, in microseconds."""
    table = Table("microseconds", title=title, title_justify="left")
    names = [name for name, _ in QUANTILES] + ["max"]
    for name in names:
        table.add_column(name, justify="right")
    for key, label in _ROWS:
        if key in summary:
            table.add_row(label, *(f"{summary[key][name]:,.1f}" for name in names))
    deadline = summary["deadline"] or {}
    for key, label in _DEADLINE_ROWS:
        if key in deadline:
            table.add_row(label, *(f"{deadline[key][name]:,.1f}" for name in names))
    console = Console(highlight=False, file=sys.stdout)
    console.print(table)
    console.print(
        f"{summary['requests']} requests ({summary['refused']} refused), {summary['tokens']} tokens in "
        f"{summary['elapsed_s']:.2f} s: {summary['tokens_per_s']:,.0f} tokens/s"
    )
    if deadline:
        console.print(_deadline_line(deadline))
    console.print(_speculation_line(summary["speculation"]))


def _deadline_line(deadline: dict[str, Any]) -> str:
    """How many of the accepted requests met their deadline, and how many were not accepted for it."""
    share = f" ({deadline['hit_rate']:.2%})" if deadline["accepted"] else ""
    met = f"deadline met by {deadline['on_time']} of {deadline['accepted']} accepted requests{share}"
    return f"{met}; {deadline['unreachable']} refused as unreachable"


def _speculation_line(speculation: dict[str, Any]) -> str:
    """Tokens per round, which drafters proposed, and how deep their drafts were accepted."""
    drafters = ", ".join(f"{name} {share:.0%}" for name, share in speculation["share_by_drafter"].items())
    depths = " ".join(f"{share:.0%}" for share in speculation["acceptance_by_depth"])
    line = f"{speculation['tokens_per_round']:.2f} tokens/round; rounds by drafter: {drafters or 'none'}"
    return f"{line}; accepted to depth 1, 2, ...: {depths}" if depths else line


def _environment(url: str, engine: dict[str, Any], executor: dict[str, Any]) -> dict[str, Any]:
    return {
        "url": url,
        "engine": engine["name"],
        "executor": executor["name"],
        "threads": executor["threads"],
        "ull": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
