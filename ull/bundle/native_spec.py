"""A weights file as the native core takes it: dimensions, frequencies, and where each tensor lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ull.bundle.layout import DRAFT, FILLER, MEDUSA
from ull.bundle.manifest import Model, Speculation
from ull.bundle.rope import attention_factor, inverse_frequencies
from ull.bundle.tensor_file import TensorEntry


def native_spec(
    model: Model,
    weights_path: Path,
    tensors: Mapping[str, TensorEntry],
    context: int,
    kv: str,
    speculation: Speculation | None = None,
) -> dict[str, Any]:
    """The dict by which `ull._native` learns about one weights file: dimensions, frequencies, where tensors lie.

    `medusa` and `draft` describe what `speculation` brings along; without it their tensors are left out.
    """
    medusa, draft = (speculation.medusa, speculation.draft) if speculation else (None, None)
    left_out = (*(() if medusa else (MEDUSA,)), *(() if draft else (DRAFT,)))
    return {
        **_dimensions(model, context, kv),
        "path": str(weights_path),
        "medusa": None if medusa is None else msgspec.to_builtins(medusa),
        "draft": None if draft is None else _dimensions(draft.model, context, draft.precision.kv),
        "tensors": {
            name: (item.offset, item.nbytes, item.dtype, item.shape)
            for name, item in tensors.items()
            if not name.endswith(FILLER) and not name.startswith(left_out)
        },
    }


def _dimensions(model: Model, context: int, kv: str) -> dict[str, Any]:
    return {
        "hidden": model.hidden,
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate": model.intermediate,
        "vocabulary": model.vocabulary,
        "context": context,
        "rms_epsilon": model.rms_epsilon,
        "kv_dtype": kv,
        "qk_norm": model.qk_norm,
        "inv_freq": inverse_frequencies(model.rope, model.head_dim),
        "attention_factor": attention_factor(model.rope),
        "windows": list(model.windows),
    }
