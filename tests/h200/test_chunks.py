"""Prompts that are read in chunks, on the chip: warpgroups' products have the bits of a warp's, or there are none.

From 1,024 positions on rounds of 16 and more have a kernel for what lies in the pages, and a short chunk's blocks share
the cache out.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ull.bundle import open_bundle
from ull.gpu.params import CHUNK_TOKENS, PREFILL, TREE_TOKENS

ROOT = Path(__file__).parent.parent.parent
TOKENS, CONTEXT = 1500, 1536
TRAINED = 900  # tokens within what the tiny model was trained on


def built(directory: Path, *options: str) -> Path:
    """The tiny engine with a longer context than it was trained for: it talks nonsense there, by the same kernels."""
    bundle, checkpoint, tiny = directory / "tiny.ull", directory / "tiny", ROOT / "engines/tiny"
    shutil.copytree(tiny, checkpoint, ignore=shutil.ignore_patterns("medusa", "eagle", "dflash", "draft"))
    config = json.loads((tiny / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (checkpoint / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "ull_build", "--model", str(checkpoint), "--drafter", "suffix", *options]
    subprocess.run([*command, "--target", "sm_90a", "--no-eval", "--quiet", "--output", str(bundle)], check=True)
    return bundle


def test_a_prompt_that_is_read_fast_leaves_the_same_bits_however_it_is_cut(tmp_path: Path) -> None:
    """And bits that are near those of exact prefill, and others."""
    from ull.gpu.program import load

    program = load(open_bundle(built(tmp_path, "--prefill", "fast")))
    try:
        rounds, said = program.replay(), []
        prompt = [(31 * index + 5) % 4096 for index in range(TOKENS)]
        place = TOKENS - 1
        whole = list(range(CHUNK_TOKENS, TOKENS, CHUNK_TOKENS))
        for cuts in (whole, [1, 130, 131, 600, *range(1000, TOKENS, 500), place]):
            for first, end in itertools.pairwise([0, *cuts]):
                rounds.wait(rounds.launch(prompt[first:end], first, PREFILL, size=CHUNK_TOKENS))
            results = rounds.answer(prompt[cuts[-1] :], cuts[-1], 16, top_logprobs=5)  # of many tokens, and of one
            said.append([[(entry.token, entry.logprob) for entry in result.tokens[0].top[:5]] for result in results])
        assert said[0] == said[1]
        exact = rounds.logits(prompt[:TRAINED])[-1]
        fast = rounds.logits(prompt[:TRAINED], in_chunks=True)[-1]
        assert 0 < np.linalg.norm(exact - fast) < 0.2 * np.linalg.norm(exact)
    finally:
        program.close()


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_prompt_leaves_the_same_bits_in_chunks_and_in_rounds(tmp_path: Path, kv: str) -> None:
    """Tokens and logprobs behind a prompt of several chunks, by the tiny engine; its last one may draw them."""
    from ull.gpu.program import load

    program = load(open_bundle(built(tmp_path, "--kv", kv)))
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
        for last in (512, 100):
            rounds.prefill(prompt[:-last])
            results = rounds.answer(prompt[-last:], TOKENS - last, 16, top_logprobs=5)
            said.append([[(entry.token, entry.logprob) for entry in result.tokens[0].top[:5]] for result in results])
        assert said == 4 * said[:1]
    finally:
        program.close()
