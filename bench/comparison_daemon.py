"""`ulld` with executors that are told what a product must not be: for comparisons and measurements.

ULL_BENCH_EXECUTOR holds keyword arguments of `_native.CpuExecutor` as JSON, some of which are `_native.GraphExecutor`'s
too: coupled (false: drafters rank candidates without the noise that the target draws with), ngram (true: the last match
alone drafts in place of the suffix drafter), replayed_acceptance (drafts are right as often as it says). See
bench/speculation.py, bench/suffixes.py and bench/h200/replay.py.
"""

import functools
import json
import os
import sys

from ull import _native
from ull.daemon import __main__ as ulld

if __name__ == "__main__":
    changes = json.loads(os.environ["ULL_BENCH_EXECUTOR"])
    for name in ("CpuExecutor", "GraphExecutor"):
        setattr(_native, name, functools.partial(getattr(_native, name), **changes))
    sys.exit(ulld.main())
