"""`python -m ull` is `ull`."""

import sys

from ull.cli import main

if __name__ == "__main__":
    sys.exit(main())
