"""What takes long before a request can be submitted: done in threads, in bounded numbers for each client."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ull.daemon.host import stand_back
from ull.errors import Busy

_WORKERS = 2

_Result = TypeVar("_Result")


class Preparation:
    """Threads that tokenize, and one that waits for the process that runs chat templates.

    At most `depth` jobs are under way. `busy` makes the error that refuses more.
    """

    def __init__(self, depth: int, busy: Callable[[str], Busy]) -> None:
        self._depth = depth
        self._busy = busy
        self._jobs: Counter[bytes] = Counter()  # under way, by client
        self._workers = ThreadPoolExecutor(_WORKERS, "ull-tokenize", stand_back)
        self._chats = ThreadPoolExecutor(1, "ull-chat", stand_back)  # there is one process that runs templates

    def close(self) -> None:
        """Begins nothing more."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._chats.shutdown(wait=False, cancel_futures=True)

    def start(
        self,
        identity: bytes,
        share: int,
        work: Callable[[], _Result],
        finish: Callable[[asyncio.Future[_Result]], None],
        *,
        chat: bool = False,
    ) -> None:
        """Does `work` in a thread, then calls `finish` with what it returned or raised, in the event loop's.

        Raises Busy where `depth` jobs, or `share` of this client, are under way.
        """
        if self._jobs.total() >= self._depth:
            raise self._busy("the queue is full")
        if self._jobs[identity] >= share:
            raise self._busy(f"{share} long prompts of this client are being read")
        self._jobs[identity] += 1
        future = asyncio.get_running_loop().run_in_executor(self._chats if chat else self._workers, work)
        future.add_done_callback(functools.partial(self._end, identity, finish))

    def _end(
        self, identity: bytes, finish: Callable[[asyncio.Future[_Result]], None], future: asyncio.Future[_Result]
    ) -> None:
        self._jobs -= Counter((identity,))  # which forgets who has none
        if not future.cancelled():  # by close()
            finish(future)
