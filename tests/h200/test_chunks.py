"""Prompts that are read in chunks, on the chip: warpgroups' products have the bits of a warp's, or there are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ull.bundle import open_bundle
from ull.gpu.params import PREFILL, TREE_TOKENS

ROOT = Path(__file__).parent.parent.parent
TOKENS = 900


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_prompt_leaves_the_same_bits_in_chunks_and_in_rounds(tmp_path: Path, kv: str) -> None:
    """Tokens and logprobs behind a prompt of more than one chunk, by the tiny engine."""
    from ull.gpu.program import load

    bundle = tmp_path / "tiny.ull"
    recipe = str(ROOT / "engines/tiny-suffix.toml")
    command = [sys.executable, "-m", "ull_build", recipe, "--target", "sm_90a", "--kv", kv]
    subprocess.run([*command, "--no-eval", "--quiet", "--output", str(bundle)], check=True)
    program = load(open_bundle(bundle))
    try:
        assert program.handover["chunk"] != 0, "on this chip products of warpgroups do not add as a warp's do"
        rounds, said = program.replay(), []
        prompt = [(31 * index + 5) % 4096 for index in range(TOKENS)]
        for whole in (False, True):
            if whole:
                rounds.prefill(prompt[:-1])
            else:
                for first in range(0, TOKENS - 1, TREE_TOKENS):
                    part = prompt[first : min(first + TREE_TOKENS, TOKENS - 1)]
                    rounds.wait(rounds.launch(part, first, PREFILL))
            results = rounds.decode(prompt[-1], TOKENS - 1, 16, top_logprobs=5)
            said.append([[(entry.token, entry.logprob) for entry in result.tokens[0].top[:5]] for result in results])
        assert said[0] == said[1]
    finally:
        program.close()
