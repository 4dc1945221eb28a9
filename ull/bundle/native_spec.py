"""A weights file as the native core takes it: dimensions, frequencies, and where each tensor lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ull.bundle.layout import DFLASH, DRAFT, EAGLE, FILLER, MEDUSA
from ull.bundle.manifest import DflashHead, EagleHead, Model, Speculation
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

    `medusa`, `draft`, `eagle` and `dflash` describe what `speculation` brings along; the tensors of those that it does
    not are left out.
    """
    brought = speculation or Speculation()
    medusa, draft = brought.medusa, brought.draft
    parts = {MEDUSA: medusa, DRAFT: draft, EAGLE: brought.eagle, DFLASH: brought.dflash}
    left_out = tuple(prefix for prefix, part in parts.items() if part is None)
    return {
        **_dimensions(model, context, kv),
        "path": str(weights_path),
        "medusa": None if medusa is None else msgspec.to_builtins(medusa),
        "draft": None if draft is None else _dimensions(draft.model, context, draft.precision.kv),
        "eagle": _head(brought.eagle, context),
        "dflash": _head(brought.dflash, context),
        "tensors": {
            name: (item.offset, item.nbytes, item.dtype, item.shape)
            for name, item in tensors.items()
            if not name.endswith(FILLER) and not name.startswith(left_out)
        },
    }


def _head(head: EagleHead | DflashHead | None, context: int) -> dict[str, Any] | None:
    if head is None:
        return None
    about = {name: getattr(head, name) for name in head.__struct_fields__ if name not in ("model", "precision", "code")}
    return {**_dimensions(head.model, context, head.precision.kv), **about}


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
