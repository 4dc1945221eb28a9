"""`ull verify` end to end, and what it makes of a daemon that does not keep the promise."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conftest import Daemon, Spawn
from processes import ull
from ull import __version__, cli
from ull.client import Client, Result
from ull.client.options import GenerateOptions
from ull.commands.determinism import CONDITIONS, Findings, Prover, Subject, Tally, prove
from ull.commands.verify import body_hash


def test_a_pass_and_its_report(shared_daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    outcome = ull("verify", shared_daemon.url, "--report", str(path), "--seed", "11", "--requests", "500")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout.splitlines()[-1].startswith("pass: ")
    report = json.loads(path.read_text())
    body = report["body"]
    assert report["sha256"] == body_hash(body)
    assert body_hash(body | {"result": "fail"}) != report["sha256"]
    with Client(shared_daemon.url) as client:
        info = client.info()
    assert (body["result"], body["seed"], body["daemon"], body["differences"]) == ("pass", 11, __version__, [])
    assert body["engine"]["digest"] == info.engine["digest"] and body["executor"]["name"] == info.executor["name"]
    assert body["machine"]["cores"] >= 1 and body["machine"]["kernel"] and body["machine"]["cpu"]
    assert body["drafters"] == info.limits["drafters"] and len(body["drafters"]) > 2
    assert set(body["conditions"]) == set(CONDITIONS)
    for by_drafter in body["conditions"].values():
        assert set(by_drafter) == set(body["drafters"])
        for tally in by_drafter.values():
            assert tally["runs"] == tally["met"] > 0 and tally["different"] == 0 and tally["tokens"] > 0
    assert body["references"] == body["cold_references"] == len(body["subjects"])
    assert {subject["kind"] for subject in body["subjects"]} >= {"greedy", "sampled", "sampled, schema"}
    assert len({subject["seed"] for subject in body["subjects"]}) == body["references"]


def test_too_few_requests_are_incomplete(shared_daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", shared_daemon.url, "--requests", "1", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)["body"]
    assert body["result"] == "incomplete" and body["differences"] == []
    assert body["references"] == 1


def test_a_condition_that_is_never_met_is_no_pass(spawn: Spawn) -> None:
    """Without a prefix cache nothing is warm."""
    daemon = spawn("--set", "engine.prefix_cache=false")
    with Client(daemon.url) as client, Client(daemon.url) as other:
        prover, findings = Prover(client, other, Random(1)), Findings()
        prover.drafters = ["none"]
        prove(prover, next(prover.subjects()), findings)
    assert findings.tallies["warm", "none"].met == 0 < findings.tallies["warm", "none"].runs
    assert findings.tallies["warm", "none"].tries > 1
    assert findings.tallies["cold", "none"].met == 1
    assert not findings.differences
    assert findings.result(["none"], {"greedy"}) == "incomplete"


class Drifting(Prover):
    """Its daemon's answers are another one's under one drafter."""

    def options(
        self, subject: Subject, drafter: str, priority: str | None = None, hold: bool | None = None
    ) -> GenerateOptions:
        options: dict[str, Any] = {**super().options(subject, drafter, priority, hold)}
        if drafter == "suffix":
            options["seed"] += 1
        return GenerateOptions(**options)


def test_a_token_that_differs_is_found(shared_daemon: Daemon) -> None:
    with Client(shared_daemon.url) as client, Client(shared_daemon.url) as other:
        prover, findings = Drifting(client, other, Random(1)), Findings()
        prover.drafters = ["none", "suffix"]
        subject = Subject("sampled", prover.prompt(5), 7, {"temperature": 1.0})
        prove(prover, subject, findings)
        assert findings.result(prover.drafters, {"sampled"}) == "fail"
        assert {item["drafter"] for item in findings.differences} == {"suffix"}
        assert len(findings.differences) == len(CONDITIONS)
        reference: Result = prover.alone(subject, "none")
    for item in findings.differences:
        assert item["expected"] == reference.token_ids[item["index"] : item["index"] + 1] != item["got"]
        assert (item["prompt"], item["seed"]) == (subject.prompt, 7)


def test_results_by_what_was_found() -> None:
    tallies = {(name, "none"): Tally(runs=2, met=2, tries=3) for name in CONDITIONS}
    findings = Findings(tallies=tallies, subjects=[{"kind": "greedy"}], cold_references=1)
    assert findings.result(["none"], {"greedy"}) == "pass"
    assert findings.result(["none", "suffix"], {"greedy"}) == "incomplete"
    assert findings.result(["none"], {"greedy", "sampled"}) == "incomplete"
    tallies["held", "none"].met = 1
    assert findings.result(["none"], {"greedy"}) == "incomplete"
    tallies["held", "none"].met = 2
    findings.cold_references = 0
    assert findings.result(["none"], {"greedy"}) == "incomplete"
    findings.differences.append({})
    assert findings.result(["none"], {"greedy"}) == "fail"


def test_wrong_use(shared_daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--report", str(tmp_path / "no/where.json")], "--report: cannot write"),
    ):
        assert cli.main(["verify", shared_daemon.url, *arguments]) == 1
        assert says in capsys.readouterr().err
    outcome = ull("verify", f"ipc://{tmp_path / 'nobody'}", "--report", str(tmp_path / "report.json"))
    assert outcome.returncode == 1 and "is ulld running?" in outcome.stderr
