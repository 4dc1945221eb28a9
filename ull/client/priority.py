"""Real-time priority for a client: its own thread, and libzmq's that works for it."""

from __future__ import annotations

import contextlib
import os
import threading

import zmq

from ull.errors import ConfigError


class ThreadPriority:
    """Runs the calling thread under SCHED_RR at `priority` (1 to 99) until close().

    `context` is a zmq context whose own thread runs likewise. Threads and processes that the caller starts do not
    inherit it. Raises ConfigError (field "priority") for a priority out of range, or without the right to one.
    """

    def __init__(self, priority: int) -> None:
        lowest, highest = os.sched_get_priority_min(os.SCHED_RR), os.sched_get_priority_max(os.SCHED_RR)
        if not lowest <= priority <= highest:
            raise ConfigError(f"priority must be {lowest} to {highest}, not {priority}", "priority")
        self._thread = threading.get_native_id()
        self._before = os.sched_getscheduler(0), os.sched_getparam(0)
        try:
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
        except PermissionError:
            raise ConfigError(
                f"priority {priority} needs the right to real-time scheduling: `ulimit -r {priority}` "
                f"(systemd: LimitRTPRIO={priority}), or CAP_SYS_NICE",
                "priority",
            ) from None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_RR)
        self.context.set(zmq.THREAD_PRIORITY, priority)

    def close(self) -> None:
        """Gives the thread its former scheduling back. A second call does nothing."""
        if self.context.closed:
            return
        self.context.term()
        policy, parameters = self._before
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setscheduler(
                self._thread, policy | os.SCHED_RESET_ON_FORK, parameters
            )  # the flag is there to stay
