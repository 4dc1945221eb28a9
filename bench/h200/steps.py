"""The steps of `make h200` by name, in the order in which they run, and which of them ULL_H200_STEPS asks for."""

from __future__ import annotations

GROUPS: dict[str, tuple[str, ...]] = {
    # Whether it is right: the chip against NumPy, PyTorch, the CPU executor and itself.
    "correctness": (
        *("build", "early-reads", "kernels", "pytorch", "engine", "memory", "persistent", "persistent-engine"),
    ),
    # How fast it is; measure.py says what each of them measures.
    "figures": (
        *("bandwidth", "bundles", "rounds", "prefill", "trees-by-warps", "client", "first-tokens", "probes"),
        *("speculation", "persistent-rounds", "trace", "profiled", "ahead"),
    ),
}


def chosen(text: str) -> dict[str, tuple[str, ...]]:
    """The steps to run, by group, of a comma-separated list of steps and groups; an empty one stands for all.

    Raises ValueError for a name that is neither.
    """
    names = [name for part in text.split(",") if (name := part.strip())] or list(GROUPS)
    known = {*GROUPS, *(step for steps in GROUPS.values() for step in steps)}
    if unknown := [name for name in names if name not in known]:
        listed = "; ".join(f"{group} ({', '.join(steps)})" for group, steps in GROUPS.items())
        raise ValueError(f"ULL_H200_STEPS: there is no step {', '.join(unknown)}; there are {listed}")
    found = {group: tuple(step for step in steps if group in names or step in names) for group, steps in GROUPS.items()}
    return {group: steps for group, steps in found.items() if steps}
