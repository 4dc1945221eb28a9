"""What is measured and in which order: the first that time runs out for is the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[int, int]  # tokens of the tree, context

SETUP_S = 12.0  # loading a model and capturing its graphs, at most
SLOWEST = 1.5  # a round of 64 tokens, or of a long context, relative to `must_ms`
CLIENT_ROUNDS = 20_000


@dataclass(frozen=True)
class Shape:
    """A model, the rounds of each of its points, and the issue's limits for a plain round, in ms."""

    arch: str
    rounds: int
    must_ms: float
    goal_ms: float
    heads: int = 0  # Medusa heads with lm_heads of their own

    def seconds(self, rounds: int) -> float:
        """What a process that loads the model and runs so many rounds takes, at most."""
        return SETUP_S + rounds * self.must_ms * SLOWEST / 1e3


SMALL = Shape("llama-3.2-1b", 1000, 0.53, 0.44)
MIDDLE = Shape("llama-3.1-8b", 500, 2.24, 2.05, heads=4)
LARGE = Shape("llama-3.3-70b", 500, 17.3, 16.9)
SHAPES = {shape.arch: shape for shape in (MIDDLE, SMALL, LARGE)}


def at(contexts: Sequence[int], *trees: int) -> list[Point]:
    return [(tree, context) for context in contexts for tree in trees]


@dataclass(frozen=True)
class Step:
    """Some points of one model, or prompts of some lengths; or else plain rounds with one kernel for all layers.

    `by_warps`: of an engine whose trees are multiplied by each warp alone.
    """

    shape: Shape
    points: Sequence[Point] = ()
    medusa: bool = False
    prompts: Sequence[int] = ()
    by_warps: bool = False

    @property
    def kind(self) -> str:
        """The step's name for ULL_H200_STEPS."""
        if self.by_warps:
            return "trees-by-warps"
        return "rounds" if self.points else "prefill" if self.prompts else "persistent-rounds"

    @property
    def name(self) -> str:
        if self.prompts:
            return f"{self.shape.arch}, prefill of {'/'.join(map(str, self.prompts))} tokens"
        if not self.points:
            return f"{self.shape.arch}, one kernel for all layers"
        trees, contexts = ("/".join(map(str, dict.fromkeys(values))) for values in zip(*self.points, strict=True))
        return f"{self.shape.arch}, T = {trees} at {contexts}{', by each warp alone' if self.by_warps else ''}"

    @property
    def estimate_s(self) -> float:
        if self.prompts:
            lengths = (*self.prompts, *(tokens for tokens, _ in TURNS))
            parts = sum((repeats(tokens) + 1) * -(-tokens // 64) for tokens in lengths)
            return self.shape.seconds(4 * parts)  # of 64 tokens, behind many in the end; in chunks a part of it
        runs = (len(self.points) or 2) + self.medusa
        return self.shape.seconds(runs * self.shape.rounds)


def repeats(tokens: int) -> int:
    """How often a prompt is measured, behind one that warms up."""
    return max(3, min(20, 16384 // tokens))


PROMPTS = (128, 1024, 2048, 8192)
TURNS = ((128, 2048), (128, 8192), (256, 8192))  # tokens of an agent's turn, and the cached ones before them
FIRST_TOKEN_PROMPTS = (128, 1024, 8192)
# An exact engine takes 512 tokens a step, one whose EAGLE-3 head reads along 511, and so a step more for 1,024 and for
# 8,192 tokens. 1,060 are three steps of either.
CLIENT_PROMPTS = (128, 1024, 1060, 8192)
FIRST_TOKENS = (  # of a client, but for an exact engine's of 8B: shape, variant of its bundle, prompts
    (MIDDLE, "fast", FIRST_TOKEN_PROMPTS),
    (MIDDLE, "eagle", FIRST_TOKEN_PROMPTS),
    (LARGE, "", (1024,)),
    (LARGE, "fast", (1024,)),
)
FIRST_STEPS = (
    Step(MIDDLE, at([128], 1, 16, 64)),
    Step(MIDDLE, prompts=PROMPTS),
    Step(SMALL, at([128], 1, 16, 64)),
    Step(LARGE, at([128], 1)),
    Step(MIDDLE, at([128], 1, 16, 32, 64) + at([8192], 1, 16, 64), by_warps=True),
)
STEPS = (  # behind the client's: the last rows of docs/figures.md
    Step(MIDDLE),
    Step(MIDDLE, at([128], 2, 4, 8, 32), medusa=True),
)
LAST_STEPS = (  # of no row
    Step(SMALL, at([128], 2, 4, 8, 32)),
    Step(MIDDLE, at([2048, 8192], 1, 8, 16, 64)),
    Step(SMALL, at([2048, 8192, 32000], 1, 16, 64)),
    Step(SMALL),
    Step(LARGE, at([128], 16, 64)),
    Step(SMALL, prompts=PROMPTS),
    Step(MIDDLE, at([32000], 1, 8, 16, 64)),
    Step(LARGE, prompts=PROMPTS[:2]),
    Step(LARGE, at([2048, 8192, 32000], 1)),
    Step(LARGE),
)
