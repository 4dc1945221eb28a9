"""The dashboard and the alerts speak of metrics that there are, and the alerts go off when they should."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "monitoring"
PAGE = (ROOT / "docs/monitoring.md").read_text()  # which tests/metrics holds to what is exported
SUFFIXES = ("_bucket", "_sum", "_count")


def listed() -> set[str]:
    return set(re.findall(r"`((?:ull|process)_\w+)`", PAGE))


def named(text: str) -> set[str]:
    names = set(re.findall(r"\b((?:ull|process)_[a-z0-9_]+)\b", text))
    for suffix in SUFFIXES:
        names = {name.removesuffix(suffix) if name.endswith(suffix) else name for name in names}
    return names


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 40
    assert not named(" ".join(expressions)) - listed()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_alerts_are_on_metrics_that_there_are() -> None:
    rules = (FOLDER / "alerts.yml").read_text()
    expressions = re.findall(r"^\s+expr: (.*)$", rules, re.MULTILINE)
    assert len(expressions) == rules.count("- alert:") == rules.count("summary:") == rules.count("description:") >= 12
    assert not named(" ".join(expressions)) - listed()
    for path in re.findall(r"docs/\w+\.md", rules):
        assert (ROOT / path).exists()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")
@pytest.mark.parametrize(
    "command",
    [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml"), ("check", "config", "prometheus.yml")],
)
def test_promtool_takes_them(command: tuple[str, ...]) -> None:
    outcome = subprocess.run(
        ["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")
def test_promtool_takes_what_the_daemon_says(tmp_path: Path) -> None:
    from prometheus_client.core import Metric

    from ull import wire
    from ull.metrics.exposition import encode
    from ull.metrics.families import BOUNDS_NS, histogram_family, unreachable

    histogram = wire.Histogram(sum=5, buckets=[(BOUNDS_NS[3], 5)])
    metrics: list[Metric] = [*unreachable(), histogram_family("ull_x_seconds", "a meaning", histogram, {})]
    text, _ = encode(metrics, "")
    outcome = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
