"""What a completion has cost, in OpenAI's words, and how its draft was accepted, in the words that AIPerf reads."""

from __future__ import annotations

from typing import Any

import msgspec

from ull.client.protocol import Result
from ull.wire import Speculation, Usage

FINISH_REASONS = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "timeout": "length",
    "deadline": "length",
}


def usage_of(usage: Usage) -> dict[str, Any]:
    """`usage` of chat and plain completions."""
    return counted(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def counted(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """As `usage_of`, of what has come so far."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def extras(result: Result) -> dict[str, Any]:
    """What only ull knows of a completion, beside OpenAI's fields: `ull`, and `metrics` where something was drafted."""
    told: dict[str, Any] = {
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "bundle": result.bundle,
        "timeline": msgspec.to_builtins(result.timeline),
        "speculation": msgspec.to_builtins(result.speculation),
    }
    if result.choice is not None:
        told["choice"] = msgspec.to_builtins(result.choice)
    if result.warnings:
        told["warnings"] = result.warnings
    drafted = speculative_decoding(result.speculation)
    return {"ull": told} | ({} if drafted is None else {"metrics": {"speculative_decoding": drafted}})


def speculative_decoding(speculation: Speculation) -> dict[str, Any] | None:
    """How many drafted tokens each step has had accepted; None where no step had a draft."""
    steps = speculation.rounds - speculation.by_drafter.get("none", 0)
    if steps <= 0 or not speculation.drafted_tokens:
        return None
    deeper = speculation.accepted_by_depth  # [d]: rounds accepted to a depth of d + 1 or beyond
    reached = [steps, *deeper]
    histogram = [here - beyond for here, beyond in zip(reached, [*deeper, 0], strict=True)]
    accepted = sum(deeper)
    return {
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "num_spec_tokens": len(deeper),
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / speculation.drafted_tokens,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": speculation.drafted_tokens,
    }
