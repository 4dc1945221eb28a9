"""`ull verify`: proves on this machine that tokens depend on nothing but the request, as a report to file."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from secrets import randbits
from typing import Any

import msgspec

from ull import __version__
from ull.commands.connection import add_key, client_of
from ull.commands.determinism import CONDITIONS, Findings, Prover, prove
from ull.commands.outcome import EXIT_FAILED
from ull.commands.report_file import ReportFile
from ull.errors import ConfigError
from ull.machine import this_machine
from ull.wire import InfoReply

FORMAT = 1
_SEED_BITS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull verify`."""
    parser.add_argument("connect", metavar="URL", nargs="?", help="the daemon (default: this user's socket)")
    add_key(parser)
    parser.add_argument("--report", metavar="FILE", help="write the report there, as JSON with a SHA-256")
    parser.add_argument("--minutes", type=float, metavar="X", help="go on with more requests for so long")
    parser.add_argument("--requests", type=int, metavar="N", help="stop after so many runs, or a few more")
    parser.add_argument("--seed", type=int, metavar="N", help="of all that is random here (default: drawn)")
    parser.add_argument("--json", action="store_true", help="print the report instead of a summary")


def run(options: argparse.Namespace) -> int:
    """Runs `ull verify`; exit status 0 only if all tokens were the same, and every condition was met."""
    if options.minutes is not None and not 0 < options.minutes < 1e6:
        raise ConfigError(f"--minutes must be above 0, not {options.minutes}", "minutes")
    if options.requests is not None and options.requests < 1:
        raise ConfigError(f"--requests must be at least 1, not {options.requests}", "requests")
    seed = randbits(_SEED_BITS) if options.seed is None else options.seed
    file = None if options.report is None else ReportFile(Path(options.report), "report")
    with client_of(options) as client, client_of(options) as other:
        began = time.monotonic()
        info = client.info()
        prover, findings = Prover(client, other, Random(seed)), Findings()
        minutes = options.minutes
        least = None if minutes is not None or options.requests is not None else 2 * len(prover.kinds)
        for subject in prover.subjects():
            prove(prover, subject, findings)
            if findings.differences and least is not None:
                break  # it has failed, and the report says where
            if least is not None and len(findings.subjects) >= least:
                break
            if options.requests is not None and findings.runs >= options.requests:
                break
            if minutes is not None and time.monotonic() - began >= 60 * minutes:
                break
        body = _body(info, client.url, prover, findings, seed, time.monotonic() - began)
    text = sealed(body)
    if file is not None:
        with file:
            file.write(text)
    if options.json:
        print(text, end="")
    else:
        _print(body)
    return 0 if body["result"] == "pass" else EXIT_FAILED


def sealed(body: dict[str, Any]) -> str:
    """A report: its body, and the SHA-256 of that as canonical JSON (sorted keys, no blanks, ASCII)."""
    return json.dumps({"body": body, "sha256": body_hash(body)}, indent=1, sort_keys=True) + "\n"


def body_hash(body: dict[str, Any]) -> str:
    """What `sha256` of a report with this body has to be."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _body(info: InfoReply, url: str, prover: Prover, findings: Findings, seed: int, seconds: float) -> dict[str, Any]:
    engine, executor = info.engine, info.executor
    conditions: dict[str, Any] = {name: {} for name in CONDITIONS}
    for (name, drafter), tally in findings.tallies.items():
        conditions[name][drafter] = asdict(tally)
    return {
        "format": FORMAT,
        "result": findings.result(prover.drafters, prover.kinds),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": math.ceil(seconds),
        "url": url,
        "seed": seed,
        "engine": {name: engine[name] for name in ("name", "digest", "source_sha256", "target")},
        "daemon": executor["version"],
        "command": __version__,
        "executor": {name: executor[name] for name in ("name", "threads", "adaptive")},
        "machine": msgspec.to_builtins(this_machine()),
        "drafters": prover.drafters,
        "runs": findings.runs,
        "references": len(findings.subjects),
        "cold_references": findings.cold_references,
        "tokens": sum(tally.tokens for tally in findings.tallies.values()),
        "conditions": conditions,
        "subjects": findings.subjects,
        "differences": findings.differences,
    }


def _print(body: dict[str, Any]) -> None:
    """A line per condition, and the result."""
    print(
        f"{body['engine']['name']} ({body['engine']['digest'][:16]}) on {body['executor']['name']}, seed {body['seed']}"
    )
    for name, by_drafter in body["conditions"].items():
        tallies = list(by_drafter.values())
        runs, met, tries, different = (
            sum(tally[key] for tally in tallies) for key in ("runs", "met", "tries", "different")
        )
        said = f"{name:13} {runs:5} runs, condition met in {met}"
        said += f" ({tries} tries)" if tries > runs else ""
        print(said + (f", {different} DIFFERENT" if different else ""))
    for item in body["differences"][:10]:
        where = f"{item['condition']}, drafter {item['drafter']}, {item['kind']}, seed {item['seed']}"
        print(f"{where}: token {item['index']} is {item['got']}, not {item['expected']}")
    print(f"{body['references']} requests, {body['runs']} runs, {body['tokens']} tokens, {body['seconds']} s")
    meaning = {
        "pass": "every token is the same under every condition with every drafter",
        "fail": "tokens differ",
        "incomplete": "no token differs, but not every condition was met in all runs, or not all was run",
    }
    print(f"{body['result']}: {meaning[body['result']]}")
