"""How a command ends: with which exit status, and with at most one line on standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from ull.errors import RequestTimeout, UllError

EXIT_FAILED = 1
EXIT_TIMED_OUT = 124  # as timeout(1) has it
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_NO_READER = 141  # 128 + SIGPIPE
STATUSES = """\
exit status:
  0    done
  1    failed: standard error says why in one line
  2    wrong usage
  124  timed out, or not done by its deadline: the answer is not whole
  130  interrupted by Ctrl-C
  141  whoever read the output has gone (as `| head` does)"""


def conclude(command: Callable[[], int]) -> int:
    """Runs `command` until all of its output is written; returns the exit status."""
    _open_streams()
    try:
        status = _written(command)
    except UllError as error:
        complain(error.message)
        status = EXIT_TIMED_OUT if isinstance(error, RequestTimeout) else EXIT_FAILED
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        status = EXIT_NO_READER
    except OSError as error:
        place = error.filename if error.filename is not None else "cannot write the output"
        complain(f"{os.fsdecode(place) if isinstance(place, bytes) else place}: {error.strerror or error}")
        status = EXIT_FAILED
    finally:
        _flush_or_drop()
    return status


def _written(command: Callable[[], int]) -> int:
    """Runs `command` and writes what is left of its output."""
    try:
        status = command()
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # rich has met one
            return EXIT_NO_READER
        sys.stdout.flush()  # the help
        raise
    sys.stdout.flush()
    return status


def complain(message: str) -> None:
    """Writes one line to standard error, behind all that standard output has had, if it takes one."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        print(f"ull: {message}", file=sys.stderr, flush=True)


def _open_streams() -> None:
    """Standard streams that are closed take what is written and drop it."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115


def _flush_or_drop() -> None:
    """Leaves nothing in standard output's buffer on which the interpreter, at its end, would fail once more."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
