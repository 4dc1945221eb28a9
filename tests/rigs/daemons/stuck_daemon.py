"""`ulld` on the scripted executor whose control plane hangs for good once it is asked to cancel request 99."""

import sys
import time

from scripted_daemon import leave_rehearsal_out, scripted
from ull import _native
from ull.daemon import __main__ as ulld
from ull.daemon import server
from ull.daemon.control import ControlPlane


def cancel(plane: ControlPlane, identity: bytes, request_id: int) -> bool:
    """In the place of the control plane's own."""
    while request_id == 99:
        time.sleep(0.01)
    return plane._engine.cancel(identity, request_id)


if __name__ == "__main__":
    _native.CpuExecutor = scripted  # type: ignore[assignment,misc]
    ControlPlane._cancel = cancel  # type: ignore[method-assign]
    server._STOP_S = 1.0  # nothing stops it: the sooner it ends, the better
    leave_rehearsal_out()
    sys.exit(ulld.main())
