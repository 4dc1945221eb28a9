"""Geometry of the FP8 scan of the lm_head and of what finds the draw with it (`ull/kernels/head_scan/head_rescore.cu`).

A round of one token captures `ull_head_scan_1`, `ull_head_bounds`, `ull_head_rescore` in place of head and sampler. The
results do not depend on the grids.
"""

from __future__ import annotations

from ull.bundle import round_up
from ull.gpu.geometry import linear
from ull.gpu.geometry.linear import Geometry

LIST_AT = 8224  # bytes from the start of HeadScanParams.scratch to the exact logits, which tests and figures read

_THREADS = 256
_BOUNDS_SHARED = 192  # BoundsShared
_RESCORE_SHARED = 8848  # RescoreShared, behind the activations
_SLICE = 1024  # rows that a block of ull_head_bounds looks at at once
_GRANULE = 64  # kGranule: rows that one block of ull_head_rescore looks at
_MOST_SLICES = 512  # kMostBlocks of sample.cuh


def scan(vocabulary: int, multiprocessors: int) -> Geometry:
    """`ull_head_scan_1`: as `ull_head_1`, whose weights have twice the bits."""
    return linear.head(vocabulary, 1, multiprocessors)


def bounds(vocabulary: int, multiprocessors: int) -> Geometry:
    """`ull_head_bounds`: a slice of the vocabulary for each block."""
    return (min(-(-vocabulary // _SLICE), multiprocessors, _MOST_SLICES), 1), _THREADS, _BOUNDS_SHARED


def rescore(hidden: int, vocabulary: int, multiprocessors: int) -> Geometry:
    """`ull_head_rescore`: granules of rows in turn for each block."""
    blocks = min(multiprocessors, -(-vocabulary // _GRANULE))
    return (blocks, 1), _THREADS, 2 * round_up(hidden, 32) + _RESCORE_SHARED
