"""`ulld` with a cpu executor that is told what a product must not be: for comparisons, see bench/speculation.py.

ULL_BENCH_EXECUTOR holds keyword arguments of `_native.CpuExecutor` as JSON: coupled (false: drafters rank candidates
without the noise that the target draws with), ngram (true: the last match alone drafts in place of the suffix drafter).
"""

import functools
import json
import os
import sys

from ull import _native
from ull.daemon import __main__ as ulld

if __name__ == "__main__":
    changes = json.loads(os.environ["ULL_BENCH_EXECUTOR"])
    _native.CpuExecutor = functools.partial(_native.CpuExecutor, **changes)  # type: ignore[assignment,misc]
    sys.exit(ulld.main())
