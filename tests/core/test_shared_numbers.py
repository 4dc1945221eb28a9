"""Numbers that Python and the core both need are the same on either side, and the core's words name its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest

from native_rig import Rig
from ull import _native, cores, wire
from ull.bundle import manifest
from ull.bundle.forward import MOST_TOKENS
from ull.client.sync import Client
from ull.daemon import admission, config
from ull.daemon.control import IoMessage
from ull.gpu import params

LIMITS = _native.LIMITS


# They are imported where there is no core, and so have numbers of their own.
CORELESS = ("ull.bundle.open", "ull.daemon.config", "ull.gpu.params", "ull.wire")


def greatest(struct: type[msgspec.Struct], key: str) -> float | None:
    """What the configuration takes at most for a key."""
    meta: msgspec.Meta = get_args(get_type_hints(struct, include_extras=True)[key])[1]
    return meta.le


def test_who_has_numbers_of_their_own_needs_no_core() -> None:
    program = f"import sys; sys.modules['ull._native'] = None; import {', '.join(CORELESS)}"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


def test_python_has_the_cores_numbers() -> None:
    assert LIMITS["tree"] == manifest.MAX_TREE == wire.MAX_TREE == params.TREE_TOKENS == MOST_TOKENS
    assert LIMITS["medusa_heads"] == manifest.MAX_MEDUSA_HEADS
    assert LIMITS["dflash_block"] == manifest.MAX_DFLASH_BLOCK
    assert LIMITS["medusa_layers"] == manifest.MAX_MEDUSA_LAYERS
    assert LIMITS["page_tokens"] == config.PAGE_TOKENS == params.PAGE_TOKENS
    assert (LIMITS["warnings"], LIMITS["warning_bytes"]) == (wire.MAX_WARNINGS, wire.MAX_WARNING_BYTES)


def test_the_configuration_goes_as_far_as_the_core() -> None:
    assert (
        greatest(config.EngineConfig, "core") == greatest(config.IoConfig, "core") == LIMITS["core"] == cores.MAX_CORE
    )
    assert greatest(config.EngineConfig, "context") == LIMITS["context"]
    assert greatest(config.EngineConfig, "queue_depth") == LIMITS["queue_depth"]
    assert greatest(config.EngineConfig, "client_share") == LIMITS["queue_depth"] + 1  # one runs
    assert greatest(config.EngineConfig, "sessions") == LIMITS["sessions"]
    assert greatest(config.SpeculationConfig, "max_tree") == LIMITS["tree"]
    assert greatest(config.SpeculationConfig, "past_outputs") == LIMITS["past_outputs"]
    assert greatest(config.GrammarsConfig, "source_bytes") == config.MAX_GRAMMAR_BYTES == LIMITS["grammar_bytes"]


def test_both_sides_speak_of_the_same_messages() -> None:
    assert {message.name.lower(): message.value for message in IoMessage} == _native.IO_MESSAGES
    assert wire.VERSION == _native.WIRE_VERSION


def test_nobody_can_change_a_limit() -> None:
    for mapping in (_native.LIMITS, _native.IO_MESSAGES):
        with pytest.raises(TypeError):
            mapping["tree"] = 65  # type: ignore[index]


def test_the_client_names_the_greatest_tree() -> None:
    assert f"1 to {LIMITS['tree']} (" in (Client.generate.__doc__ or "")


def labels(count: int) -> list[list[int]]:
    """As many different ones."""
    return [[1 + i % 100, 1 + i // 100] for i in range(count)]


@pytest.fixture
def rig(tmp_path: Path) -> Any:
    with Rig(tmp_path, {"tokens": [65]}) as rig:
        yield rig


@pytest.mark.parametrize(
    ("field", "within", "beyond", "said"),
    [
        ("logprobs", LIMITS["logprobs"], LIMITS["logprobs"] + 1, f"0 to {LIMITS['logprobs']}"),
        ("max_tree", LIMITS["tree"], LIMITS["tree"] + 1, f"1 to {LIMITS['tree']} tokens"),
        ("choices", labels(LIMITS["choices"]), labels(LIMITS["choices"] + 1), f"at most {LIMITS['choices']} are taken"),
        (
            "choices",
            [[1] * LIMITS["choice_tokens"]],
            [[1] * (LIMITS["choice_tokens"] + 1)],
            f"at most {LIMITS['choice_tokens']} are taken",
        ),
        ("stop_ids", [1] * LIMITS["stop_ids"], [1] * (LIMITS["stop_ids"] + 1), f"more than {LIMITS['stop_ids']} "),
        ("stop", [b"x"] * LIMITS["stops"], [b"x"] * (LIMITS["stops"] + 1), f"at most {LIMITS['stops']} strings"),
        ("stop", [b"x" * LIMITS["stop_bytes"]], [b"x" * (LIMITS["stop_bytes"] + 1)], f"1 to {LIMITS['stop_bytes']} by"),
        ("warnings", ["x"] * LIMITS["warnings"], ["x"] * (LIMITS["warnings"] + 1), f"at most {LIMITS['warnings']}, "),
        (
            "warnings",
            ["x" * LIMITS["warning_bytes"]],
            ["x" * (LIMITS["warning_bytes"] + 1)],
            f"at most {LIMITS['warning_bytes']} bytes",
        ),
    ],
)
def test_the_engine_takes_a_limit_and_names_it_beyond(
    rig: Rig, field: str, within: Any, beyond: Any, said: str
) -> None:
    rig.submit(b"client", 1, b"a", max_tokens=1, **{field: within})
    with pytest.raises(_native.InvalidRequest, match=f"^{field}: .*{said}"):
        rig.submit(b"client", 2, b"a", max_tokens=1, **{field: beyond})


@pytest.mark.parametrize(
    ("field", "end", "outwards"),
    [
        ("repetition_penalty", admission.MIN_REPETITION_PENALTY, -np.inf),
        ("repetition_penalty", admission.MAX_REPETITION_PENALTY, np.inf),
        ("presence_penalty", -admission.MAX_PENALTY, -np.inf),
        ("presence_penalty", admission.MAX_PENALTY, np.inf),
        ("frequency_penalty", -admission.MAX_PENALTY, -np.inf),
        ("frequency_penalty", admission.MAX_PENALTY, np.inf),
    ],
)
def test_admission_takes_the_engines_penalties(rig: Rig, field: str, end: float, outwards: float) -> None:
    """The scripted executor applies none; the range is looked at before that."""
    beyond = float(np.nextafter(np.float32(end), np.float32(outwards)))
    for value, said in ((end, "this engine's executor applies no penalties"), (beyond, "must be ")):
        with pytest.raises(_native.InvalidRequest, match=f"^{field}: {said}"):
            rig.submit(b"client", 1, b"a", max_tokens=1, **{field: value})
