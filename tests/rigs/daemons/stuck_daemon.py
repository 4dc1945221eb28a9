"""`ulld` on the scripted executor whose control plane hangs for good once it is asked to cancel request 99."""

import sys
import time

from scripted_daemon import leave_rehearsal_out, scripted
from ull import _native
from ull.daemon import __main__ as ulld
from ull.daemon import server
from ull.daemon.turns import Turns


def cancel(turns: Turns, key: tuple[bytes, int]) -> bool:
    """In the place of the control plane's own."""
    while key[1] == 99:
        time.sleep(0.01)
    return turns._engine.cancel(*key)


if __name__ == "__main__":
    _native.CpuExecutor = scripted  # type: ignore[assignment,misc]
    Turns.cancel = cancel  # type: ignore[method-assign]
    server._STOP_S = 1.0  # nothing stops it: the sooner it ends, the better
    leave_rehearsal_out()
    sys.exit(ulld.main())
