"""The same figures under the names that others know: `metrics.compat = "vllm"`.

vLLM's names are what its Grafana dashboard, llm-d's router and AIPerf read
(https://docs.vllm.ai/en/latest/usage/metrics.html).
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ull import wire
from ull.metrics.families import histogram_family

PAGE_TOKENS = 64  # of a page of the KV cache: the core's number, held equal by tests/metrics/test_families.py
_HISTOGRAMS = {
    "time_to_first_token": "time_to_first_token_seconds",
    "inter_token": "request_time_per_output_token_seconds",
    "round": "inter_token_latency_seconds",
    "end_to_end": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "decode": "request_decode_time_seconds",
}
_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length", "error": "error"}  # all others: abort


def vllm_families(stats: wire.StatsReply, info: wire.InfoReply) -> Iterator[Metric]:
    """What vLLM would say, each with the label `model_name`."""
    model = {"model_name": str(info.engine.get("name", ""))}
    labels, values = list(model), list(model.values())

    def gauge(name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", f"as vLLM's {name}", labels=labels)
        family.add_metric(values, value)
        return family

    def counter(name: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", f"as vLLM's {name}", labels=labels)
        family.add_metric(values, value)
        return family

    engine, requests = stats.engine, stats.requests
    pages = engine["page_count"]
    yield gauge("num_requests_running", engine["running"])
    yield gauge("num_requests_waiting", engine["queue_length"])
    yield gauge("kv_cache_usage_perc", engine["pages_used"] / pages if pages else 0.0)
    yield counter("prefix_cache_queries", engine["prompt_tokens"])
    yield counter("prefix_cache_hits", engine["cached_tokens"])
    yield counter("prompt_tokens", requests["prompt_tokens"])
    yield counter("generation_tokens", requests["completion_tokens"])
    yield counter("num_preemptions", engine["suspensions"])
    yield counter("spec_decode_num_drafts", sum(n for name, n in engine["by_drafter"].items() if name != "none"))
    yield counter("spec_decode_num_draft_tokens", engine["drafted_tokens"])
    yield counter("spec_decode_num_accepted_tokens", engine["accepted_tokens"])
    finished: dict[str, int] = {}
    for reason, count in requests["finished"].items():
        named = _REASONS.get(reason, "abort")
        finished[named] = finished.get(named, 0) + count
    success = CounterMetricFamily(
        "vllm:request_success", "as vLLM's request_success", labels=[*labels, "finished_reason"]
    )
    for reason, count in finished.items():
        success.add_metric([*values, reason], count)
    yield success
    cache = GaugeMetricFamily(
        "vllm:cache_config_info", "as vLLM's cache_config_info", labels=[*labels, "block_size", "num_gpu_blocks"]
    )
    cache.add_metric([*values, str(PAGE_TOKENS), str(pages)], 1)
    yield cache
    for name, metric in _HISTOGRAMS.items():
        if name in stats.histograms:
            yield histogram_family(f"vllm:{metric}", f"as vLLM's {metric}", stats.histograms[name], model)
