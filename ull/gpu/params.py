"""ctypes mirrors of `ull/kernels/params.h`; a test compares every size and offset with the C++ structs."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p

from ull.bundle import MLP_SCALE as MLP_SCALE
from ull.wire import MAX_TREE

INTERFACE = 16
AWAITED = 1 << 63  # in a request's sequence: the round waits for the number alone
TREE_TOKENS = MAX_TREE
ROUND_SLOTS = 4
STOP_TOKENS = 32
BIASES = 1024
ALTERNATIVES = 20
MEDUSA_RANKS = 10
PAGE_TOKENS = 64
MASK_TOKENS = 128
SPLIT_TOKENS = 256
MOST_TAPS = 8
TAP_SLOTS = 512
CHUNK_TOKENS = 512
CHUNK_TILE = 128
CHUNK_PARTS = CHUNK_TOKENS // CHUNK_TILE
SLICES = 8
LAYER_LINEARS = 4
PROMPTED, GENERATED = 1, 2  # in a word of the text's counts

TAKE, CONTINUE, PREFILL, MEDUSA, REDRAW, EAGLE, DFLASH_CONTEXT, DFLASH_BLOCK, DFLASH_NODES = range(9)  # RoundMode
OK, SKIPPED, NOT_FINITE = range(3)  # RoundStatus


class LogitBias(ctypes.Structure):
    _fields_ = [("token", c_int32), ("bias", c_float)]


class Sampling(ctypes.Structure):
    _fields_ = [
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("seed", c_uint64),
        ("top_logprobs", c_int32),
        ("bias_count", c_int32),
        ("repetition_penalty", c_float),
        ("frequency_penalty", c_float),
        ("presence_penalty", c_float),
        ("penalises", c_int32),
    ]


class RoundRequest(ctypes.Structure):
    _fields_ = [
        ("sequence", c_uint64),
        ("mode", c_uint32),
        ("count", c_int32),
        ("position", c_int32),
        ("max_tokens", c_int32),
        ("setting", c_uint32),
        ("page_count", c_int32),
        ("stop_count", c_int32),
        ("text", c_uint32),
        ("prompt_tokens", c_int32),
        ("forced", c_int32),
        ("first", c_int32),
        ("awaited", c_int32),
        ("tokens", c_int32 * TREE_TOKENS),
        ("parents", c_uint8 * TREE_TOKENS),
        ("sampling", Sampling),
        ("stops", c_int32 * STOP_TOKENS),
        ("biases", LogitBias * BIASES),
        ("tail", c_uint8 * 24),  # to a multiple of 64
    ]


class HostControl(ctypes.Structure):
    _fields_ = [("cancelled_through", c_uint64), ("tail", c_uint8 * 56)]


class TokenLogprob(ctypes.Structure):
    _fields_ = [("token", c_int32), ("logprob", c_float)]


class EmittedToken(ctypes.Structure):
    _fields_ = [
        ("token", c_int32),
        ("logprob", c_float),
        ("top_count", c_int32),
        ("node", c_int32),
        ("top", TokenLogprob * ALTERNATIVES),
    ]


class RoundResult(ctypes.Structure):
    _fields_ = [
        ("sequence", c_uint64),
        ("status", c_uint32),
        ("count", c_int32),
        ("begin_ns", c_uint64),
        ("end_ns", c_uint64),
        ("stopped", c_int32),
        ("padding", c_int32 * 7),
        ("tokens", EmittedToken * (TREE_TOKENS + 1)),
        ("tail", c_uint8 * 16),  # to a multiple of 64
    ]


class Round(ctypes.Structure):
    _fields_ = [
        ("sequence", c_uint64),
        ("mode", c_uint32),
        ("count", c_int32),
        ("base", c_int32),
        ("max_tokens", c_int32),
        ("draws", c_int32),
        ("first_draw", c_int32),
        ("begin_ns", c_uint64),
        ("tokens", c_int32 * TREE_TOKENS),
        ("depths", c_int32 * TREE_TOKENS),
        ("path", (c_uint8 * TREE_TOKENS) * TREE_TOKENS),
        ("rows", c_uint8 * TREE_TOKENS),
        ("drawn", EmittedToken * TREE_TOKENS),
        ("accepted_count", c_int32),
        ("accepted", c_uint8 * TREE_TOKENS),
        ("first", c_int32),
    ]


class Chunk(ctypes.Structure):
    _fields_ = [("sequence", c_uint64), ("base", c_int32), ("count", c_int32), ("tokens", c_int32 * CHUNK_TOKENS)]


class State(ctypes.Structure):
    _fields_ = [
        ("sequence", c_uint64),
        ("token", c_int32),
        ("position", c_int32),
        ("stopped", c_int32),
        ("setting", c_uint32),
        ("stop_count", c_int32),
        ("node", c_int32),
        ("sampling", Sampling),
        ("text", c_uint32),
        ("counted", c_int32),
        ("prompt_tokens", c_int32),
        ("unused", c_int32),
        ("stops", c_int32 * STOP_TOKENS),
        ("biases", LogitBias * BIASES),
    ]


class BeginParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("state", c_void_p),
        ("requests", c_void_p),
        ("control", c_void_p),
        ("host_pages", c_void_p),
        ("pages", c_void_p),
        ("counters", c_void_p),
        ("host_text", c_void_p),
        ("text", c_void_p),
        ("text_counts", c_void_p),
        ("host_mask", c_void_p),
        ("mask", c_void_p),
        ("target", c_void_p),
        ("target_state", c_void_p),
        ("host_chunks", c_void_p),
        ("chunk", c_void_p),
        ("counter_count", c_int32),
        ("page_capacity", c_int32),
        ("text_capacity", c_int32),
        ("padding", c_int32),
    ]


class EmbedParams(ctypes.Structure):
    _fields_ = [("round", c_void_p), ("table", c_void_p), ("residual", c_void_p)]


class NormParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("residual", c_void_p),
        ("norm_weight", c_void_p),
        ("normed", c_void_p),
        ("partial", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("taps", c_void_p),
        ("unit", c_float),
    ]


class LinearParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("weights", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("residual", c_void_p),
        ("norm_weight", c_void_p),
        ("activations", c_void_p),
        ("output", c_void_p),
        ("partial", c_void_p),
        ("maxima", c_void_p),
        ("taps", c_void_p),
    ]


class AttentionParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("qkv", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("rope", c_void_p),
        ("pages", c_void_p),
        ("page_pool", c_void_p),
        ("tree_keys", c_void_p),
        ("tree_values", c_void_p),
        ("kv_scale", c_void_p),
        ("partial", c_void_p),
        ("counters", c_void_p),
        ("output", c_void_p),
        ("page_bytes", c_int64),
        ("layer_offset", c_int64),
        ("window", c_int32),
        ("splits", c_int32),
        ("o_weights", c_void_p),
        ("gate_up_weights", c_void_p),
        ("linear_blocks", c_int32),
        ("page_blocks", c_int32),
        ("unused", c_int32 * 2),
    ]


class LayerParams(ctypes.Structure):
    _fields_ = [
        ("linears", LinearParams * LAYER_LINEARS),  # qkv, o, gate_up, down
        ("attention", AttentionParams),
    ]


class LayersParams(ctypes.Structure):
    _fields_ = [("round", c_void_p), ("layers", c_void_p), ("arrivals", c_void_p)]


class SampleParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("state", c_void_p),
        ("logits", c_void_p),
        ("scratch", c_void_p),
        ("text_counts", c_void_p),
        ("mask", c_void_p),
    ]


class AcceptParams(ctypes.Structure):
    _fields_ = [("round", c_void_p), ("state", c_void_p), ("results", c_void_p), ("text", c_void_p)]


class PlainParams(ctypes.Structure):
    _fields_ = [
        ("sample", SampleParams),
        ("accept", AcceptParams),
        ("counters", c_void_p),
        ("parts", c_int32),
        ("padding", c_int32),
    ]


class HeadScanParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("state", c_void_p),
        ("weights", c_void_p),
        ("scale", c_void_p),
        ("bound", c_void_p),
        ("residual", c_void_p),
        ("norm_weight", c_void_p),
        ("logits", c_void_p),
        ("normed", c_void_p),
        ("scratch", c_void_p),
        ("accept", AcceptParams),
    ]


class CommitParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("pages", c_void_p),
        ("page_pool", c_void_p),
        ("tree_keys", c_void_p),
        ("tree_values", c_void_p),
        ("results", c_void_p),
        ("counters", c_void_p),
        ("tapped", c_void_p),
        ("tap_ring", c_void_p),
        ("page_bytes", c_int64),
    ]


class MedusaStartParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("state", c_void_p),
        ("residual", c_void_p),
        ("norm_weight", c_void_p),
        ("normed", c_void_p),
    ]


class MedusaRankParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("state", c_void_p),
        ("logits", c_void_p),
        ("scratch", c_void_p),
        ("text_counts", c_void_p),
        ("counters", c_void_p),
    ]


class TapsParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("ring", c_void_p),
        ("norm_weight", c_void_p),
        ("output", c_void_p),
        ("ring_taps", c_int32),
        ("taps", c_int32 * MOST_TAPS),
        ("padding", c_int32),
    ]


class EagleInputParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("table", c_void_p),
        ("states", c_void_p),
        ("outputs", c_void_p),
        ("embedding_norm", c_void_p),
        ("hidden_norm", c_void_p),
        ("output_norm", c_void_p),
        ("input", c_void_p),
        ("residual", c_void_p),
    ]


class EagleRankParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("state", c_void_p),
        ("logits", c_void_p),
        ("names", c_void_p),
        ("scratch", c_void_p),
        ("text_counts", c_void_p),
        ("counters", c_void_p),
    ]


class DflashStoreParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("partial", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("k_norm", c_void_p),
        ("rope", c_void_p),
        ("kv_scale", c_void_p),
        ("tree_keys", c_void_p),
        ("tree_values", c_void_p),
    ]


class DflashNodesParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("residual", c_void_p),
        ("norm_weight", c_void_p),
        ("embedding", c_void_p),
        ("confidence", c_void_p),
        ("confidence_bias", c_void_p),
        ("factors", c_void_p),
        ("gate_input", c_void_p),
    ]


class DflashRankParams(ctypes.Structure):
    _fields_ = [
        ("round", c_void_p),
        ("state", c_void_p),
        ("logits", c_void_p),
        ("names", c_void_p),
        ("text", c_void_p),
        ("scratch", c_void_p),
        ("text_counts", c_void_p),
        ("counters", c_void_p),
    ]


class ChunkEmbedParams(ctypes.Structure):
    _fields_ = [("chunk", c_void_p), ("table", c_void_p), ("residual", c_void_p)]


class ChunkNormParams(ctypes.Structure):
    _fields_ = [
        ("chunk", c_void_p),
        ("residual", c_void_p),
        ("norm_weight", c_void_p),
        ("normed", c_void_p),
        ("taps", c_void_p),
        ("token_scale", c_void_p),
        ("partial", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("last", c_void_p),
        ("unit", c_float),
        ("padding", c_int32),
    ]


class ChunkTapsParams(ctypes.Structure):
    _fields_ = [
        ("chunk", c_void_p),
        ("ring", c_void_p),
        ("norm_weight", c_void_p),
        ("output", c_void_p),
        ("ring_taps", c_int32),
        ("taps", c_int32 * MOST_TAPS),
        ("padding", c_int32),
    ]


class ChunkEagleInputParams(ctypes.Structure):
    _fields_ = [
        ("chunk", c_void_p),
        ("table", c_void_p),
        ("states", c_void_p),
        ("embedding_norm", c_void_p),
        ("hidden_norm", c_void_p),
        ("input", c_void_p),
    ]


class ChunkQuantiseParams(ctypes.Structure):
    _fields_ = [
        ("chunk", c_void_p),
        ("activations", c_void_p),
        ("quantised", c_void_p),
        ("token_scale", c_void_p),
        ("steps", c_int32),
        ("padding", c_int32),
    ]


class ChunkLinearParams(ctypes.Structure):
    _fields_ = [
        ("chunk", c_void_p),
        ("weights", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("activations", c_void_p),
        ("output", c_void_p),
        ("token_scale", c_void_p),
        ("partial", c_void_p),
        ("whole", c_int32 * CHUNK_PARTS),
    ]


class ChunkStoreParams(ctypes.Structure):
    _fields_ = [
        ("chunk", c_void_p),
        ("qkv", c_void_p),
        ("k_norm", c_void_p),
        ("rope", c_void_p),
        ("pages", c_void_p),
        ("page_pool", c_void_p),
        ("kv_scale", c_void_p),
        ("page_bytes", c_int64),
        ("layer_offset", c_int64),
    ]


class ChunkAttentionParams(ctypes.Structure):
    _fields_ = [
        ("chunk", c_void_p),
        ("qkv", c_void_p),
        ("q_norm", c_void_p),
        ("rope", c_void_p),
        ("pages", c_void_p),
        ("page_pool", c_void_p),
        ("kv_scale", c_void_p),
        ("output", c_void_p),
        ("partial", c_void_p),
        ("counters", c_void_p),
        ("page_bytes", c_int64),
        ("layer_offset", c_int64),
        ("window", c_int32),
        ("blocks", c_int32),
        ("results", c_int32),
        ("padding", c_int32),
    ]


class ChunkProbeParams(ctypes.Structure):
    _fields_ = [
        ("differences", c_void_p),
        ("seed", c_uint32),
        ("rounds", c_int32),
        ("flaw", c_int32),
        ("padding", c_int32),
    ]


class FillParams(ctypes.Structure):
    _fields_ = [
        ("output", c_void_p),
        ("bytes", c_int64),
        ("seed", c_uint64),
        ("format", c_int32),
        ("amplitude", c_float),
    ]
