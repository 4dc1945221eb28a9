"""NVIDIA's AIPerf against the gateway: what it counts is what was served, and its figures are there."""

import json
from pathlib import Path

import pytest

from gateways import Gateway
from load_generators import TOKENIZER, run_tool, tool

AIPERF = tool("aiperf")
REQUESTS, WARM_UP, TOKENS = 6, 2, 16


class Profile:
    """What AIPerf has exported and printed of one run."""

    def __init__(self, gateway: Gateway, directory: Path, endpoint: str, *arguments: str) -> None:
        command = [AIPERF, "profile", "--model", "tiny", "--url", gateway.base, "--endpoint-type", endpoint]
        command += ["--tokenizer", str(TOKENIZER), "--random-seed", "5", "--extra-inputs", "ignore_eos:true"]
        command += ["--concurrency", "1", "--request-count", str(REQUESTS), "--warmup-request-count", str(WARM_UP)]
        command += ["--synthetic-input-tokens-mean", "40", "--synthetic-input-tokens-stddev", "0"]
        command += ["--output-tokens-mean", str(TOKENS), "--output-tokens-stddev", "0"]
        command += ["--wait-for-model-timeout", "30", "--ui", "none"]
        command += ["--no-gpu-telemetry", "--no-server-metrics", "--export-level", "records", "--artifact-dir", "out"]
        # With HF_HUB_OFFLINE AIPerf 0.13 takes a folder's path for the name of a repository.
        self.printed = run_tool([*command, *arguments], directory, HF_HUB_OFFLINE="", TRANSFORMERS_OFFLINE="")
        self.summary = json.loads((directory / "out/profile_export_aiperf.json").read_text(encoding="utf-8"))
        lines = (directory / "out/profile_export.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        self.records = [record for record in records if record["metadata"]["benchmark_phase"] == "profiling"]

    def at(self, name: str, statistic: str = "avg") -> float:
        """A figure of the summary."""
        return float(self.summary[name][statistic])


def check_served(profile: Profile) -> None:
    """Every request has been answered."""
    assert (profile.at("request_count"), profile.summary["error_summary"]) == (REQUESTS, [])
    assert profile.at("request_error_rate") == 0
    assert (profile.summary["is_complete"], profile.summary["was_cancelled"]) == (True, False)
    assert len(profile.records) == REQUESTS


def check_counts(profile: Profile, gateway: Gateway) -> None:
    """AIPerf has counted what the gateway says that it has served."""
    check_served(profile)
    for record in profile.records:
        line = gateway.wait_request(id=record["metadata"]["x_request_id"])
        metrics = {name: metric["value"] for name, metric in record["metrics"].items()}
        assert metrics["usage_prompt_tokens"] == metrics["input_sequence_length"] == line["prompt_tokens"]
        assert metrics["usage_completion_tokens"] == metrics["output_sequence_length"] == line["completion_tokens"]
        assert line["completion_tokens"] == TOKENS
    assert profile.at("total_osl") == profile.at("total_usage_completion_tokens") == REQUESTS * TOKENS


def check_times(profile: Profile) -> None:
    """The figures of a stream are there and agree with one another."""
    for record in profile.records:
        metrics = {name: metric["value"] for name, metric in record["metrics"].items()}
        assert 0 < metrics["time_to_first_token"] <= metrics["request_latency"]
        decoding = metrics["request_latency"] - metrics["time_to_first_token"]
        gaps = metrics["output_sequence_length"] - 1
        assert metrics["inter_token_latency"] == pytest.approx(decoding / gaps, rel=0.01, abs=1e-3)
        between = metrics.get("inter_chunk_latency", [0])  # a stream that came in one chunk has none
        assert min(between) >= 0
        assert sum(between) <= decoding * 1.001 + 1e-3
    assert profile.at("output_token_throughput") > 0


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_counts_what_the_gateway_streams(endpoint: str, gateway: Gateway, tmp_path: Path) -> None:
    profile = Profile(gateway, tmp_path, endpoint, "--streaming", "--use-server-token-count")
    check_counts(profile, gateway)
    check_times(profile)


def test_aiperf_times_streamed_responses(gateway: Gateway, tmp_path: Path) -> None:
    """It counts tokens itself: of a response that ends with its limit, which is incomplete, it reads no usage."""
    profile = Profile(gateway, tmp_path, "responses", "--streaming")
    check_served(profile)
    check_times(profile)
    for record in profile.records:
        line = gateway.wait_request(id=record["metadata"]["x_request_id"])
        assert line["path"] == "/v1/responses" and 0 < line["completion_tokens"] <= TOKENS


@pytest.mark.parametrize("arguments", [["--streaming"], []], ids=["streamed", "whole"])
def test_aiperf_shows_how_drafts_were_accepted(arguments: list[str], drafting: Gateway, tmp_path: Path) -> None:
    profile = Profile(drafting, tmp_path, "chat", "--use-server-token-count", *arguments)
    check_counts(profile, drafting)
    assert "LLM Metrics: Spec Decode" in profile.printed
    names = ("total_spec_decode_steps", "total_draft_tokens", "total_accepted_draft_tokens")
    steps, drafted, accepted = (profile.at(name) for name in names)
    histogram = profile.summary["pooled_spec_decode_acceptance_histogram"]
    assert sum(histogram.values()) == steps > 0
    assert sum(int(depth) * count for depth, count in histogram.items()) == accepted
    assert 0 < accepted <= drafted
    assert profile.at("spec_decode_overall_draft_acceptance_rate") == pytest.approx(100 * accepted / drafted)
    assert profile.at("spec_decode_token_weighted_acceptance_length") == pytest.approx(1 + accepted / steps)
