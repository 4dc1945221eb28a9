"""The server of a daemon's figures as a process: `python -m ull.metrics`, as the daemon starts it.

Its options come on standard input, as one line of JSON; it ends where that is closed. It prints READY and its address,
or why it cannot serve.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from ull.curve import CurveKeys
from ull.errors import UllError

MISSING = "metrics.listen needs the extra `ops`: pip install 'ull[ops]'"


def main() -> int:
    """Serves until standard input ends. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the daemon; its end is the end here
    try:
        os.nice(10)
        from ull.metrics.server import ExporterOptions, serving

        values = json.loads(sys.stdin.readline())
        if values.get("keys") is not None:
            values["keys"] = CurveKeys(**values["keys"])
        with serving(ExporterOptions(**values)) as (server, source):
            threading.Thread(target=_wait_for_end, daemon=True).start()
            print(f"READY {server.url}", flush=True)
            source.run()
    except ModuleNotFoundError as error:
        print(f"{MISSING} (there is no module {error.name})", flush=True)
        return 1
    except UllError as error:
        print(error.message, flush=True)
        return 1
    return 0


def _wait_for_end() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
