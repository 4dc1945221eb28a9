"""`ull-build` whose kernels are stubs, for the driver double. ULL_TEST_KERNELS: the folder of their sources."""

import os
import sys
from pathlib import Path

from ull_build import cli
from ull_build.code import kernels

if __name__ == "__main__":
    kernels.SOURCES = Path(os.environ["ULL_TEST_KERNELS"])
    sys.exit(cli.main())
