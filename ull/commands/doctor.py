"""`ull doctor`: whether this machine is fit to serve tokens without jitter, and what mends it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ull.bundle.open import read_manifest
from ull.client import Client
from ull.commands.connection import add_connection, client_of
from ull.cores import core_list, parse_cores
from ull.doctor import gpu, kernel, limits, trials
from ull.doctor.check import Finding, Host, Topic, Verdict
from ull.errors import ConfigError, UllError, UsageError
from ull.install.machine import read_machine

_STATUSES = """\
exit status:
  0    all is well, or could not be looked at
  1    a warning: it works, but not as evenly as it could
  2    something critical
As always 1 is also an error, which standard error tells, and 2 wrong usage."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    command.add_argument("--bundle", type=Path, metavar="DIR", help="an engine bundle that is to run here")
    command.add_argument("--cores", metavar="LIST", help="hot cores (default: a running daemon's, else isolated ones)")
    command.add_argument("--device", type=int, metavar="N", help="number of the GPU (default: 0)")
    command.add_argument("--noise", type=float, metavar="S", help="listen for gaps on each hot core for so long")
    command.add_argument("--selftest", action="store_true", help="2,000 rounds of a running daemon, which must be idle")
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
    command.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="a tree to look at in place of /")
    add_connection(command)
    command.epilog = _STATUSES
    command.formatter_class = argparse.RawDescriptionHelpFormatter


def run(options: argparse.Namespace) -> int:
    """Looks, prints, and says by the exit status how bad it is."""
    if options.noise is not None and not 0 < options.noise <= 3600:
        raise UsageError(f"--noise must be above 0 and at most 3600 seconds, not {options.noise:g}")
    target = "" if options.bundle is None else read_manifest(options.bundle).target
    if options.device is not None and options.device < 0:
        raise UsageError(f"--device must be 0 or above, not {options.device}")
    host = Host(options.root, _hot_cores(options), options.device, target)
    findings = list(_examine(host, options))
    worst = max((finding.verdict for finding in findings), default=Verdict.OK)
    if options.json:
        print(json.dumps(_as_json(host, findings, worst), indent=2))
    else:
        _print(findings)
    return max(0, int(worst))


def _examine(host: Host, options: argparse.Namespace) -> Iterator[Finding]:
    for check in (*kernel.CHECKS, *limits.CHECKS, *gpu.CHECKS):
        yield from check(host)
    if options.noise is not None:
        yield from trials.noise(host.cores or (-1,), options.noise)
    if options.selftest:
        try:
            with client_of(options) as client:
                yield from trials.rounds(client)
        except UllError as error:
            yield Topic("self-test", "it shows what clients hear").critical(error.message, "start the daemon first")


def _hot_cores(options: argparse.Namespace) -> tuple[int, ...]:
    if options.cores is not None:
        cores = parse_cores(options.cores)
        try:
            online = read_machine(options.root).online
        except ConfigError:
            return cores  # this tree does not tell
        if missing := [core for core in cores if core not in online]:
            raise ConfigError(f"this machine has no core {missing[0]}: it has {core_list(online)}", "cores")
        return cores
    if options.connect is not None or options.selftest:
        try:
            with client_of(options) as client:
                return _placed(client)
        except UllError:
            pass  # the self-test says so
    try:
        return read_machine(options.root).isolated
    except UllError:
        return ()


def _placed(client: Client) -> tuple[int, ...]:
    """Where a daemon's engine and io threads run, if they have cores of their own."""
    placement = client.info().executor["placement"]
    cores = {core for name in ("computing", "io") for core in placement.get(name) or ()}
    return tuple(sorted(cores))


def _print(findings: Iterable[Finding]) -> None:
    ordered = sorted(findings, key=lambda finding: finding.verdict)
    width = max(len(finding.name) for finding in ordered)
    for finding in ordered:
        print(f"{finding.verdict.word:8}  {finding.name:{width}}  {finding.value}")
        if finding.verdict >= Verdict.WARNING:
            print(f"{'':8}  {'':{width}}  why: {finding.why}")
            print(f"{'':8}  {'':{width}}  mend: {finding.remedy}")


def _as_json(host: Host, findings: Iterable[Finding], worst: Verdict) -> dict[str, object]:
    return {
        "schema": 1,
        "verdict": max(worst, Verdict.OK).word,
        "cores": list(host.cores),
        "findings": [
            {
                "name": finding.name,
                "verdict": finding.verdict.word,
                "value": finding.value,
                "why": finding.why,
                "remedy": finding.remedy or None,
            }
            for finding in findings
        ],
    }
