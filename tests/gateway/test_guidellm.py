"""GuideLLM against the gateway: it takes the gateway's word that it is well, and counts what was served."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateways import Gateway
from load_generators import TOKENIZER, run_tool, tool

GUIDELLM = tool("guidellm")
REQUESTS, TOKENS = 5, 16


def benchmark(gateway: Gateway, directory: Path, profile: str, backend: str = "") -> dict[str, Any]:
    """What GuideLLM reports of one run, which begins with its own look at /health."""
    target = f"kind=openai_http,target={gateway.base},model=tiny,validate_backend=true{backend}"
    command = [GUIDELLM, "run", "--backend", target, "--profile", profile, "--disable-console-interactive"]
    command += ["--tokenizer", f"kind=hf_auto,model={TOKENIZER}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={TOKENS}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--output", "kind=json,path=report.json"]
    run_tool(command, directory, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    (result,) = json.loads((directory / "report.json").read_text(encoding="utf-8"))["benchmarks"]
    return dict(result)


@pytest.mark.parametrize(
    ("profile", "path"),
    [
        ("kind=synchronous", "/v1/chat/completions"),
        ("kind=concurrent,streams=2", "/v1/chat/completions"),
        ("kind=synchronous", "/v1/completions"),
    ],
)
def test_guidellm_counts_what_the_gateway_serves(profile: str, path: str, gateway: Gateway, tmp_path: Path) -> None:
    before = len(gateway.requests())
    report = benchmark(gateway, tmp_path, profile, f",request_format={path}")
    totals = report["metrics"]["request_totals"]
    # With two streams one request may be under way when enough of them have ended.
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    served = [(line["prompt_tokens"], line["completion_tokens"]) for line in requests_of(gateway, before, path)]
    for request in report["requests"]["successful"]:
        counted = (request["input_metrics"]["total_tokens"], request["output_metrics"]["total_tokens"])
        assert counted[1] == TOKENS
        served.remove(counted)  # raises where it was not served
        assert request["output"]
        timings = request["info"]["timings"]
        assert timings["request_start"] < timings["first_token_iteration"] <= timings["last_token_iteration"]
    metrics = report["metrics"]
    for name in ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency"):
        assert metrics[name]["successful"]["mean"] > 0
    assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * TOKENS


def requests_of(gateway: Gateway, before: int, path: str) -> list[dict[str, Any]]:
    """The log's lines about what was served at `path` since there were `before` lines."""
    lines = [line for line in gateway.requests()[before:] if line["path"] == path and "completion_tokens" in line]
    assert len(lines) >= REQUESTS
    return lines


def test_guidellm_keeps_how_drafts_were_accepted(drafting: Gateway, tmp_path: Path) -> None:
    report = benchmark(drafting, tmp_path, "kind=synchronous")
    kept = [request["response_metrics"]["speculative_decoding"] for request in report["requests"]["successful"]]
    assert len(kept) == REQUESTS
    for drafted in kept:
        assert sum(drafted["acceptance_histogram"]) == drafted["num_spec_steps"] > 0
        assert 0 <= drafted["num_accepted_draft_tokens"] <= drafted["num_draft_tokens"]
