"""SIGALRM for a while."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ringing(ring: Callable[[int, FrameType | None], None], after_s: float, every_s: float) -> Iterator[None]:
    """Calls `ring` in the main thread after `after_s`, and then every `every_s` (0: once), until the block ends.

    What is still pending then rings for nobody: the handler before may be the one that ends tests that take too long.
    """
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, after_s, every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, before)
