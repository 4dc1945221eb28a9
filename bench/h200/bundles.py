"""Bundles that `make h200` builds: each once of the same sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sources import BUNDLE, digest

from ull.bundle import SEAL_FILE


def build_once(bundle: Path, *options: str) -> bool:
    """ull-build with these options, unless the bundle is there and was made so; whether it was made now."""
    stamp, made_from = bundle.with_suffix(".sources"), digest(*BUNDLE, extra=" ".join(options))
    if (bundle / SEAL_FILE).exists() and stamp.exists() and stamp.read_text() == made_from:
        return False
    command = [sys.executable, "-m", "ull_build", *options, "--output", str(bundle), "--force", "--quiet"]
    subprocess.run(command, check=True)
    stamp.write_text(made_from)
    return True
