"""What a drafter would win on held-out text: replays the target's own outputs against the drafter's candidates.

Exact, not a model: the engine's rule accepts a proposal when it equals the target's draw, candidates are ranked with
the same Gumbel noise as that draw, and the outputs *are* the target's draws. So hits on them are acceptances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ull_build.train.data import Sequences

# Candidates per depth of the tree whose gain is reported: 5 + 15 + 15 + 15 nodes under the root.
TREE_WIDTHS = (5, 3, 1, 1)
SIBLINGS = 6  # candidates per depth that a draft model's chain offers, those beside it being leaves
MAX_RANK = 8

# (index of a sequence, first position, last position + 1) -> logits [positions, depths, V]: what the drafter, standing
# at a position, holds for the tokens first_ahead, first_ahead + 1, ... after it, everything before being accepted.
Proposals = Callable[[int, int, int], NDArray[np.float32]]


@dataclass(frozen=True)
class Acceptance:
    """Per temperature: hits[depth][rank - 1], the share of tokens among the first `rank` candidates, and tokens/round.

    `chain` follows the first candidates. `tree` has TREE_WIDTHS for Medusa heads, and for a draft model the chain with
    SIBLINGS - 1 leaves at every depth.
    """

    temperature: float
    tokens: int
    hits: list[list[float]]
    chain: float
    tree: float


def ranks(logits: NDArray[np.float32], tokens: NDArray[np.int32], noise: NDArray[np.float32]) -> NDArray[np.int32]:
    """[N, V] logits divided by the temperature -> the rank of each token once the noise is added, 0 = first."""
    scores = logits + noise
    own = scores[np.arange(len(tokens)), tokens]
    better: NDArray[np.int32] = (scores > own[:, None]).sum(axis=1).astype(np.int32)
    return better


def token_noise(seed: int, positions: Sequence[int], vocabulary: int, temperature: float) -> NDArray[np.float32]:
    """The noise with which the target drew the tokens at `positions`, [N, V]; zeros for a greedy request."""
    if temperature == 0:
        return np.zeros((len(positions), vocabulary), np.float32)
    from ull import _native

    everything = np.arange(vocabulary, dtype=np.int32)
    return np.stack([np.asarray(_native.gumbel(seed, position, everything)) for position in positions])


def measure(outputs: Sequences, proposals: Proposals, depths: int, first_ahead: int) -> list[Acceptance]:
    """Acceptance of a drafter on `outputs`, one entry per temperature.

    `first_ahead` is how far ahead of its position the first depth looks: 2 for Medusa's heads, 1 for a draft model.
    """
    found: dict[float, list[NDArray[np.int32]]] = {}
    for place in range(len(outputs)):
        tokens, prompt = outputs.sequence(place), int(outputs.prompts[place])
        temperature = float(outputs.temperatures[place])
        first, last = prompt - 1, len(tokens) - first_ahead - depths + 1
        if last <= first:
            continue
        logits = proposals(place, first, last)
        positions = range(first + first_ahead, last + first_ahead + depths - 1)
        noise = token_noise(int(outputs.seeds[place]), positions, logits.shape[-1], temperature)
        scale = np.float32(1.0 if temperature == 0 else 1.0 / temperature)
        table = np.stack(
            [
                ranks(
                    logits[:, depth] * scale,
                    tokens[first + first_ahead + depth : last + first_ahead + depth],
                    noise[depth : depth + last - first],
                )
                for depth in range(depths)
            ],
            axis=1,
        )
        found.setdefault(round(temperature, 6), []).append(table)
    return [_summary(temperature, tables, first_ahead) for temperature, tables in sorted(found.items())]


def _summary(temperature: float, tables: list[NDArray[np.int32]], first_ahead: int) -> Acceptance:
    every = np.concatenate(tables)
    hits = [[float(share) for share in (every < rank).mean(axis=0)] for rank in range(1, MAX_RANK + 1)]
    widths = (*TREE_WIDTHS, *[1] * every.shape[1])[: every.shape[1]]
    chain = sum(_rounds(_leading(table < 1)) for table in tables)
    if first_ahead == 1:
        tree = sum(_rounds(_beside_chain(table)) for table in tables)
    else:
        tree = sum(_rounds(_leading(table < np.array(widths, np.int32))) for table in tables)
    return Acceptance(
        temperature,
        len(every),
        [list(depth) for depth in zip(*hits, strict=True)],
        len(every) / chain,
        len(every) / tree,
    )


def _leading(inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[positions, depths] -> how many depths are inside before the first that is not."""
    return np.asarray(np.cumprod(inside, axis=1, dtype=np.int64).sum(axis=1), np.int64)


def _beside_chain(table: NDArray[np.int32]) -> NDArray[np.int64]:
    """Tokens accepted of a chain of first candidates with leaves beside it, SIBLINGS candidates per depth in all."""
    accepted = _leading(table < 1)
    missed = np.minimum(accepted, table.shape[1] - 1)
    leaf = (table[np.arange(len(table)), missed] < SIBLINGS) & (accepted < table.shape[1])
    return np.asarray(accepted + leaf, np.int64)


def _rounds(accepted: NDArray[np.int64]) -> int:
    """Rounds that one sequence takes when a round at a position accepts that many tokens, [positions]."""
    position = rounds = 0
    while position < len(accepted):
        position += 1 + int(accepted[position])
        rounds += 1
    return rounds


def describe(results: Sequence[Acceptance]) -> list[str]:
    """One line per temperature and depth, for people."""
    lines = []
    for result in results:
        kind = "greedy" if result.temperature == 0 else f"T={result.temperature:g}"
        for depth, shares in enumerate(result.hits):
            text = ", ".join(f"top-{rank} {shares[rank - 1]:.1%}" for rank in (1, 2, 4, 8))
            lines.append(f"{kind}, depth {depth + 1}: {text}")
        lines.append(f"{kind}: {result.chain:.2f} tokens/round in a chain, {result.tree:.2f} in a tree")
    return lines
