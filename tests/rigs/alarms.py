"""SIGALRM for a while."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ringing(ring: Callable[[int, FrameType | None], None], after_s: float, every_s: float) -> Iterator[None]:
    """Calls `ring` in the main thread after `after_s`, and then every `every_s` (0: once), until the block ends.

    What is still pending then rings for nobody: the handler before may be the one that ends tests that take too long.
    Its alarm, if it had set one, is set again.
    """
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    began_s = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s, every_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began_s), 0.001))
