"""A few rounds of the tiny engine, small enough to run under compute-sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ull.bundle import open_bundle

ROOT = Path(__file__).parent.parent.parent


def test_every_graph_runs(tmp_path: Path) -> None:
    from ull.gpu.program import load

    if not (bundle := os.environ.get("ULL_H200_TINY")):  # built before: under compute-sanitizer that takes minutes
        bundle = str(tmp_path / "tiny.ull")
        command = [sys.executable, "-m", "ull_build", str(ROOT / "engines/tiny-medusa.toml"), "--target", "sm_90a"]
        subprocess.run([*command, "--no-eval", "--quiet", "--output", bundle], check=True)
    program = load(open_bundle(Path(bundle)))
    try:
        rounds = program.replay()
        prompt = [(31 * index + 5) % 4096 for index in range(300)]  # two attention splits
        rounds.prefill(prompt[:-1])
        for size in (1, 2, 4, 8, 16, 32, 64):
            tree = [prompt[-1], *((17 * index + 3) % 4096 for index in range(size - 1))]
            parents = [max(0, index // 2 - 1) for index in range(size)]  # siblings at every node
            result = rounds.wait(rounds.launch(tree, 299, parents=parents, temperature=0.8, seed=5, top_logprobs=5))
            assert 1 <= result.count <= size
            heads = rounds.wait(rounds.medusa(299 + result.count, temperature=0.8, seed=5, top_logprobs=5))
            assert all(0 <= token.top[0].token < 4096 for token in heads.tokens[: heads.count]) and heads.count > 0
        forced = rounds.wait(rounds.launch(prompt[-40:], 260, forced=39, temperature=0.8, seed=5))
        assert forced.count == 1 and 0 <= forced.tokens[0].token < 4096
        redrawn = rounds.wait(rounds.redraw(39, 299, [77, 78], temperature=0.8, seed=5))
        assert redrawn.count == 1 and redrawn.tokens[0].token in (77, 78)
        scored = rounds.wait(rounds.score([5, 6, 7], [39, 39, 38]))
        assert scored.count == 3 and all(token.logprob < 0 for token in scored.tokens[:3])
        assert len(rounds.decode(prompt[-1], 299, 8, temperature=0.8, seed=5)) == 8
        for last in (200, 70):  # of 70 tokens o and down leave sums of slices
            assert len(rounds.answer(prompt[-last:], 300 - last, 3, temperature=0.8, seed=5)) == 3
        rounds.answer(prompt[-200:], 100, 1, temperature=0.8, seed=5)
        redrawn = rounds.wait(rounds.redraw(0, 299, [77, 78], temperature=0.8, seed=5))
        assert redrawn.count == 1 and redrawn.tokens[0].token in (77, 78)
    finally:
        program.close()
