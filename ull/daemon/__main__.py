"""The program `ulld`. It does nothing but see to it that an interrupt while Python imports the rest is no traceback."""

import signal
import sys


def main() -> int:
    """Returns the exit status, which ull/daemon/server.py explains."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ull.daemon.main import run
    from ull.daemon.process import open_standard_streams

    open_standard_streams()
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
