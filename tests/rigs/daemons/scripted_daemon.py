"""`ulld` with a scripted executor in place of the model, so that tests decide how long a step takes and which fails.

The script is JSON in ULL_TEST_SCRIPT: keyword arguments of `_native.ScriptedExecutor`. Everything else is the real
daemon: control plane, engine thread, io thread, watchdog. The request that the daemon sends itself is left out, so that
the script's first step is the first client's.
"""

import functools
import json
import os
import sys
from typing import Any

from ull import _native
from ull.daemon import __main__ as ulld
from ull.daemon import server


def scripted(spec: dict[str, Any], **_: Any) -> _native.ScriptedExecutor:
    """Takes the arguments of CpuExecutor."""
    script = {"tokens": [40, 41, 42, 43], "vocabulary": spec["vocabulary"], "context": spec["context"]}
    return _native.ScriptedExecutor(**(script | json.loads(os.environ["ULL_TEST_SCRIPT"])))


def leave_rehearsal_out() -> None:
    """No step is the daemon's own."""
    server.run = functools.partial(server.run, rehearse=False)


if __name__ == "__main__":
    _native.CpuExecutor = scripted  # type: ignore[assignment,misc]
    leave_rehearsal_out()
    sys.exit(ulld.main())
