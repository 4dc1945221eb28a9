"""`ulld` that sees only the claims on cores of daemons whose ULL_TEST_CLAIMS is the same."""

import os
import sys

from ull.daemon import __main__ as ulld
from ull.daemon import placement, server

if __name__ == "__main__":
    prefix = os.environ["ULL_TEST_CLAIMS"]
    server.CoreClaims = lambda: placement.CoreClaims(prefix)  # type: ignore[assignment,misc]
    sys.exit(ulld.main())
