"""A few rounds of the tiny engine under compute-sanitizer.

python bench/h200/memory_checks.py BUNDLE    # made once; status 75 where the machine refuses the tool
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bundles import build_once
from sources import ROOT

REFUSED = 75
REFUSAL = "Device not supported"  # as gVisor's is not


def main() -> int:
    bundle = Path(sys.argv[1])
    # Before the checks: under compute-sanitizer it takes minutes.
    build_once(bundle, str(ROOT / "engines/tiny-medusa.toml"), "--target", "sm_90a", "--no-eval")
    tests = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=short"]
    command = ["compute-sanitizer", "--error-exitcode", "9", *tests, "tests/h200/test_small.py"]
    environment = {**os.environ, "ULL_H200_TINY": str(bundle), "ULL_PATIENCE_S": "120"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        refused = False
        for line in process.stdout:
            print(line, end="", flush=True)
            refused |= REFUSAL in line
    return REFUSED if refused else process.returncode


if __name__ == "__main__":
    sys.exit(main())
