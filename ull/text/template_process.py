"""Chat templates run in a process of their own, which may be ended: nothing that a template does can be waited for.

A template is a program. Within Python neither its time nor its memory can be bounded from outside, so it runs where
the kernel bounds both, and where it holds up nobody's tokens.

    parent -> child    u32 length, msgpack {"name": ..., "source": ...}: a template to compile
    parent -> child    u32 length, msgpack {"name": ..., "arguments": {...}}: a chat, as ChatTemplate.render takes it
    child -> parent    u32 length, msgpack {} once it is ready, then for each of them {"text": ...} or {"error": ...}
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ull.errors import TokenizerError
from ull.spawn import python_command, python_environment
from ull.text.chat_template import ChatError, ChatTemplate

TIME_LIMIT_S = 5.0  # for one chat; a thousand times what a long one takes
MEMORY_LIMIT = 512 << 20  # bytes beyond what the process has when it is ready
_START_LIMIT_S = 60.0
_GRACE_S = 1.0  # the process's own alarm comes first
_LENGTH = struct.Struct("<I")
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # meant for the parent; its end is the end here


class TemplateProcess:
    """Compiles and runs `templates` (name -> source) in a child process. Thread-safe.

    The child is started when it is first needed, or by `start`, and again after it was ended.
    """

    def __init__(self, templates: Mapping[str, str], time_limit_s: float = TIME_LIMIT_S) -> None:
        self._templates = dict(templates)
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the child without waiting for it."""
        with self._lock:
            self._child = self._child or _Child(self._time_limit_s)

    def compile(self, name: str) -> None:
        """Compiles one template. Raises ChatError saying why it cannot be compiled."""
        self._within_limits(lambda: self._compile(name))

    def render(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of one chat; `arguments` are ChatTemplate.render's. Raises ChatError."""
        return self._within_limits(lambda: self._render(name, arguments))

    def close(self) -> None:
        """Ends the child, whatever it does; nothing is rendered from then on."""
        self._closed = True
        if (child := self._child) is not None:
            child.close()

    def _within_limits(self, work: Callable[[], str]) -> str:
        with self._lock:
            used = self._child is not None
            try:
                return work()
            except _ChildEnded as error:
                if not used or error.timed_out or self._closed:
                    raise ChatError(self._reason(error)) from error
            try:  # it may have ended long ago
                return work()
            except _ChildEnded as error:
                raise ChatError(self._reason(error)) from error

    def _compile(self, name: str) -> str:
        if self._closed:
            raise ChatError("the tokenizer is closed")
        child = self._child = self._child or _Child(self._time_limit_s)
        if name not in child.compiled:
            self._ask(child, {"name": name, "source": self._templates[name]})
            child.compiled.add(name)
        return ""

    def _render(self, name: str, arguments: Mapping[str, Any]) -> str:
        self._compile(name)
        assert self._child is not None
        return self._ask(self._child, {"name": name, "arguments": arguments})

    def _ask(self, child: _Child, question: dict[str, Any]) -> str:
        try:
            reply = child.ask(question, self._time_limit_s + _GRACE_S)
        except BaseException:  # what it answers later would be taken for the answer to something else
            self._child = None
            child.close()
            raise
        if "error" in reply:
            raise ChatError(reply["error"])
        return str(reply["text"])

    def _reason(self, error: _ChildEnded) -> str:
        if error.timed_out:
            return f"it takes longer than {self._time_limit_s:g} s"
        return "it ended its process (for want of memory, or too deep a recursion)"


class _ChildEnded(Exception):
    """The child has ended, or was too slow and must."""

    def __init__(self, timed_out: bool) -> None:
        super().__init__("the process that runs templates has ended")
        self.timed_out = timed_out


class _Child:
    """One child process and the socket to it."""

    def __init__(self, time_limit_s: float) -> None:
        self.compiled: set[str] = set()
        self._ready = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*python_command("ull.text.template_process"), str(time_limit_s)],
                env=python_environment(),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._end = weakref.finalize(self, _end, self._process, self._socket)

    def ask(self, question: Any, time_limit_s: float) -> dict[str, Any]:
        """The answer to `question`. Raises _ChildEnded."""
        deadline = time.monotonic() + time_limit_s
        try:
            if not self._ready:
                self._hear(time.monotonic() + _START_LIMIT_S)
                self._ready = True
                deadline = time.monotonic() + time_limit_s
            self._socket.settimeout(time_limit_s)
            _send(self._socket, question)
            return self._hear(deadline)
        except TimeoutError:
            raise _ChildEnded(timed_out=True) from None
        except OSError:
            raise self._ended() from None

    def close(self) -> None:
        """Ends the process at once."""
        self._end()

    def _hear(self, deadline: float) -> dict[str, Any]:
        answer = _receive(self._socket, deadline)
        if answer is None:
            raise self._ended()
        return answer

    def _ended(self) -> _ChildEnded:
        self._process.kill()
        return _ChildEnded(timed_out=self._process.wait() == -signal.SIGALRM)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _send(connection: socket.socket, message: Any) -> None:
    payload = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(connection: socket.socket, deadline: float | None = None) -> dict[str, Any] | None:
    """The next message; None at the end of the connection. Raises TimeoutError at `deadline` (time.monotonic())."""
    head = _receive_bytes(connection, _LENGTH.size, deadline)
    if head is None:
        return None
    body = _receive_bytes(connection, _LENGTH.unpack(head)[0], deadline)
    return None if body is None else msgspec.msgpack.decode(body, type=dict[str, Any])


def _receive_bytes(connection: socket.socket, count: int, deadline: float | None) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        chunk = connection.recv(min(count - len(received), 1 << 20))
        if not chunk:
            return None
        received += chunk
    return bytes(received)


def main(time_limit_s: float) -> None:
    """The child: answers on standard input, a socket, until it is closed."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it does
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    with contextlib.suppress(OSError):  # the parent's threads may have a priority
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(OSError):  # where memory runs out, this process goes and not the daemon
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = socket.socket(fileno=0)
    _limit_memory()
    _send(connection, {})
    templates: dict[str, ChatTemplate] = {}
    while (question := _receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)
        reply = _answer(templates, question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, reply)


def _limit_memory() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = size + MEMORY_LIMIT
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(templates: dict[str, ChatTemplate], question: dict[str, Any]) -> dict[str, str]:
    name = question["name"]
    try:
        if "source" in question:
            templates[name] = ChatTemplate(question["source"])
            return {"text": ""}
        return {"text": templates[name].render(**question["arguments"])}
    except (ChatError, TokenizerError) as error:
        return {"error": str(error)[:1000]}
    except (MemoryError, RecursionError):
        return {"error": "it needs too much memory"}


if __name__ == "__main__":
    import sys

    main(float(sys.argv[1]))
