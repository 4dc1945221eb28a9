"""`ull-gateway`, also as `python -m ull.gateway`."""

from __future__ import annotations

import sys

from ull.gateway.main import main

if __name__ == "__main__":
    sys.exit(main())
