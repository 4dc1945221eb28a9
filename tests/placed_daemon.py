"""`ulld` on a machine of the test's own making.

It sees only the claims on cores of daemons whose ULL_TEST_CLAIMS is the same, and libzmq's threads go to the core
ULL_TEST_LIBZMQ, if that is set, whatever was decided: it takes four cores for them to be alone anywhere.
"""

import os
import sys
from dataclasses import replace
from typing import Any

from ull import daemon, placement, ulld


def place(*arguments: Any, **options: Any) -> placement.Placement:
    """What `placement.place` decides, but for libzmq's core."""
    decided = placement.place(*arguments, **options)
    core = os.environ.get("ULL_TEST_LIBZMQ")
    return decided if core is None else replace(decided, libzmq=frozenset({int(core)}))


if __name__ == "__main__":
    prefix = os.environ["ULL_TEST_CLAIMS"]
    daemon.CoreClaims = lambda: placement.CoreClaims(prefix)  # type: ignore[assignment,misc]
    daemon.place = place
    sys.exit(ulld.main())
