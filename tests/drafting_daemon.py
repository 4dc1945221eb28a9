"""`ulld` whose executor drafts the widest tree that is allowed in every round, whether that pays or not."""

import functools
import sys

from ull import _native, ulld

if __name__ == "__main__":
    for name in ("CpuExecutor", "GraphExecutor"):
        setattr(_native, name, functools.partial(getattr(_native, name), adaptive=False))
    sys.exit(ulld.main())
