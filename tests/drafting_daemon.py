"""`ulld` whose GPU executor drafts the widest tree that is allowed in every round, whether that pays or not."""

import functools
import sys

from ull import _native, daemon

if __name__ == "__main__":
    _native.GraphExecutor = functools.partial(_native.GraphExecutor, adaptive=False)  # type: ignore[assignment,misc]
    sys.exit(daemon.main())
