"""`ulld` on the scripted executor that does send itself a request before it is ready, and can be made to fail on it.

Environment: ULL_TEST_SCRIPT as for scripted_daemon.py; ULL_TEST_REHEARSAL: "" (all is well), "tokenizer" (raises),
"deaf" (the control plane loses every request, and half a second of silence is enough), "patient" (it waits for long).
Nothing warms up: the script's first step is that of the daemon's own request.
"""

import os
import sys
from typing import Any

from scripted_daemon import scripted
from ull import _native
from ull.daemon import __main__ as ulld
from ull.daemon import rehearsal
from ull.daemon.control import ControlPlane
from ull.text.tokenizer import Tokenizer


def broken(*_: Any, **__: Any) -> list[int]:
    """In the place of Tokenizer.encode."""
    raise KeyError("no such piece")


if __name__ == "__main__":
    _native.CpuExecutor = scripted  # type: ignore[assignment,misc]
    _native.Engine.warm_up = lambda _: None  # type: ignore[method-assign]
    fault = os.environ.get("ULL_TEST_REHEARSAL", "")
    if fault == "tokenizer":
        Tokenizer.encode = broken  # type: ignore[method-assign]
    elif fault == "deaf":
        ControlPlane._request = lambda *_: None  # type: ignore[method-assign]
        rehearsal.LIMIT_S = 0.5
    elif fault == "patient":
        ControlPlane._request = lambda *_: None  # type: ignore[method-assign]
    sys.exit(ulld.main())
