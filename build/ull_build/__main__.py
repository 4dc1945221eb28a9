"""`python -m ull_build` is `ull-build`."""

import sys

from ull_build.cli import main

sys.exit(main())
