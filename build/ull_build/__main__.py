"""The program `ull-build`. It sees to it that what goes wrong while Python imports the rest is no traceback."""

import signal
import sys


def main() -> int:
    """Returns the exit status, which `ull_build.cli` explains."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from ull_build.cli import main as build
    except (ImportError, MemoryError) as error:  # a library that is missing, or for which there is no memory
        print(f"ull-build: error: cannot be loaded: {str(error) or 'out of memory'}", file=sys.stderr)
        return 1
    status = build()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # what is done is done, while Python takes itself down
    return status


if __name__ == "__main__":
    sys.exit(main())
