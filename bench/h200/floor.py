"""What a model asks of memory and tensor cores at least: bytes of a round, bytes and operations of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ull.bundle import MEDUSA, Bundle, Model

KV_BYTES = {"bf16": 2, "fp8": 1}


def weight_bytes(bundle: Bundle) -> int:
    """What a plain round must read: every linear weight and scale and the lm_head; of the embedding only a row."""
    return sum(entry.nbytes for name, entry in bundle.tensors.items() if not name.startswith(("embed.", MEDUSA)))


def layer_bytes(bundle: Bundle) -> int:
    """What one pass over a prompt must read of the weights: it ends before the lm_head."""
    return sum(entry.nbytes for name, entry in bundle.tensors.items() if name.startswith("layers."))


def medusa_bytes(bundle: Bundle) -> int:
    """What Medusa heads with lm_heads of their own must read."""
    return sum(entry.nbytes for name, entry in bundle.tensors.items() if name.startswith(MEDUSA))


def keys_seen(model: Model, context: int) -> int:
    """Positions that attention looks at behind `context` tokens, summed over the layers, each with its own window."""
    return sum(min(context, window) if window else context for window in model.windows)


def kv_bytes(model: Model, kv: str, context: int) -> int:
    """Keys and values that a round at `context` must read."""
    return 2 * model.kv_heads * model.head_dim * KV_BYTES[kv] * keys_seen(model, context)


def kv_bytes_of(bundle: Bundle, context: int) -> int:
    return kv_bytes(bundle.manifest.model, bundle.manifest.precision.kv, context)


def prompt_bytes(bundle: Bundle, parts: Sequence[range], draws: bool = False) -> int:
    """What a prompt must read that is read in such parts: the layers' weights, and the keys and values before each.

    `draws`: and the lm_head, once.
    """
    starts = [part.start for part in parts]
    head = weight_bytes(bundle) - layer_bytes(bundle) if draws else 0
    return len(starts) * layer_bytes(bundle) + head + sum(kv_bytes_of(bundle, start) for start in starts)


def prompt_operations(model: Model, tokens: int, behind: int = 0) -> int:
    """Multiplications and additions of a prompt: its matrix products, and causal attention within each window.

    `behind`: positions that are cached before it.
    """
    attention_width = model.heads * model.head_dim
    qkv = (attention_width + 2 * model.kv_heads * model.head_dim) * model.hidden
    weights = model.layers * (qkv + attention_width * model.hidden + 3 * model.hidden * model.intermediate)
    scores = sum(keys_seen(model, position + 1) for position in range(behind, behind + tokens))
    return 2 * tokens * weights + 4 * attention_width * scores
