"""The journal as the control plane sees it: takes a record of every request that has ended, and never waits.

A thread of its own writes them, from a queue that is bounded in records and in bytes.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from ull.daemon.config import JournalConfig
from ull.daemon.host import stand_back
from ull.daemon.journal_file import JournalFile
from ull.daemon.turn import Turn
from ull.errors import JournalUnavailable
from ull.journal import Dropped, Grammar, Label, Parameters, Record, Request, describe, timestamp
from ull.log import Log
from ull.wire import Ended

MOST_RECORDS = 4096  # that wait to be written, ...
MOST_BYTES = 64 << 20  # ... and what they take, about
_RECORD_BYTES = 4096  # of one without its ids, about
_BATCH = 64  # records of one write, ...
_BATCH_BYTES = 4 << 20  # ... unless they take so much before
_RETRY_S = 0.5  # between two tries to write what could not be written
_SAY_LOSS_S = 1.0  # at most one line about dropped records in this time


class Journal:
    """Writes records to `file`, which it closes. `record`, `check` and `stats` are the event loop's.

    With `config.required`, `check` refuses requests while records cannot be written or too many wait; what was
    accepted before is recorded all the same, so that the queue outgrows its bound by that at most. Without, records
    that find no room are dropped: the log, `stats` and the chain say how many.
    """

    def __init__(self, config: JournalConfig, file: JournalFile, log: Log) -> None:
        self._config = config
        self._file = file
        self._log = log
        self._changed = threading.Condition()
        self._queue: deque[tuple[Record, int]] = deque()  # with about how many bytes each takes
        self._batch: list[Record] = []  # taken from the queue, and not yet written
        self._batch_bytes = 0
        self._grammars: dict[str, Grammar] = {}  # that the records of both name
        self._bytes = 0  # of both
        self._records = 0  # written, of requests
        self._dropped = 0  # since the start, ...
        self._unsaid = 0  # ... of which the chain does not tell yet
        self._said_s = -math.inf  # when the log last told of some
        self._failure: str | None = None  # why nothing can be written
        self._failures = 0
        self._problem: str | None = None  # of the file, as last logged
        self._longest_ns = 0  # of a write, with its sync
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ull-journal", daemon=True)
        self._thread.start()

    @property
    def unavailable(self) -> str | None:
        """Why new requests are refused; None: they are not."""
        if not self._config.required:
            return None
        if (failure := self._failure) is not None:
            return f"every request must be recorded, and the journal cannot be written: {failure}"
        with self._changed:
            full = self._is_full()
        if full:
            return "every request must be recorded, and the journal is behind: too many records wait to be written"
        return None

    def check(self) -> None:
        """Raises JournalUnavailable where a new request could not be recorded, and must be."""
        if (reason := self.unavailable) is not None:
            raise JournalUnavailable(reason)

    def record(self, ended: Ended, turn: Turn, completion: Sequence[int]) -> None:
        """Takes the record of a request that has ended."""
        source = turn.source if turn.grammar is not None else None
        size = _RECORD_BYTES + (0 if source is None else len(source.text)) + sum(map(len, turn.request.choices or ()))
        size += 4 * len(completion) + (0 if turn.record is None else len(turn.record[0]))
        record = _request(ended, turn, completion, self._file.bundle)
        with self._changed:
            if self._closing or (self._is_full() and not self._config.required):
                self._drop()
                return
            self._tell_of_dropped()
            if source is not None and record.grammar is not None:
                self._grammars[record.grammar] = Grammar(key=record.grammar, form=source.kind, source=source.text)
            self._queue.append((record, size))
            self._bytes += size
            self._changed.notify()

    def stats(self) -> dict[str, Any]:
        """The figures, for `stats`."""
        with self._changed:
            return {
                "records": self._records,
                "dropped": self._dropped,
                "waiting": len(self._queue) + len(self._batch),
                "waiting_bytes": self._bytes,
                "sequence": self._file.chain.sequence,
                "head": self._file.chain.head,
                "file": str(self._file.path),
                "file_bytes": self._file.size,
                "files": self._file.files,
                "syncs": self._file.syncs,
                "failures": self._failures,
                "failure": self._failure,
                "longest_write_ns": self._longest_ns,
            }

    def close(self, timeout_s: float) -> None:
        """Writes what waits, for at most `timeout_s` seconds, and says what was lost."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            lost = self._dropped_in_chain()
            if self._thread.is_alive() or lost:
                reason = self._failure or "the disk takes too long"
                self._log.error("journal", message=f"{lost} records are lost at the end: {reason}", lost=lost)
        if not self._thread.is_alive():
            self._file.close()

    def _is_full(self) -> bool:
        return len(self._queue) + len(self._batch) >= MOST_RECORDS or self._bytes >= MOST_BYTES

    def _dropped_in_chain(self) -> int:
        """Records of requests that no line holds, nor tells of."""
        return self._unsaid + sum(_counts(record) for record, _ in self._queue) + sum(map(_counts, self._batch))

    def _drop(self) -> None:
        self._dropped += 1
        self._unsaid += 1
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_LOSS_S:
            self._said_s = now_s
            reason = self._failure or "records come faster than the disk takes them"
            self._log.warning("journal", message=f"records of requests are dropped: {reason}", dropped=self._dropped)

    def _tell_of_dropped(self) -> None:
        """The chain says how many records are missing, where they would stand."""
        if self._unsaid:
            self._queue.append((Dropped(time=timestamp(), records=self._unsaid), _RECORD_BYTES))
            self._bytes += _RECORD_BYTES
            self._unsaid = 0

    def _run(self) -> None:
        stand_back()
        due_s = time.monotonic()  # when what was written is to be on the disk
        while self._await_work(due_s):
            began_ns = time.monotonic_ns()
            try:
                if self._batch:
                    self._file.append(self._batch, self._grammars)
                    self._written()
                if self._config.fsync != "interval" or self._closing or time.monotonic() >= due_s:
                    self._file.sync()
                    due_s = time.monotonic() + self._config.fsync_interval_ms / 1000
                self._works()
            except OSError as error:
                self._fails(error)
                if not self._wait_to_retry():
                    return
            except Exception as error:  # not the disk's: this thread must not end without a word
                self._fails(OSError(0, f"{type(error).__name__}: {error}"))
                if not self._wait_to_retry():
                    return
            self._longest_ns = max(self._longest_ns, time.monotonic_ns() - began_ns)

    def _await_work(self, due_s: float) -> bool:
        """Waits for records or for a sync that is due; takes a batch. False: it is closed, and all is written."""
        with self._changed:
            while not self._batch and not self._queue:
                if self._unsaid and (self._closing or not self._is_full()):
                    self._tell_of_dropped()
                elif self._closing:
                    return self._file.unsynced and self._failure is None
                elif self._file.unsynced:
                    left_s = due_s - time.monotonic()
                    if left_s <= 0:
                        return True
                    self._changed.wait(left_s)
                else:
                    self._changed.wait()
            while self._queue and len(self._batch) < _BATCH and self._batch_bytes < _BATCH_BYTES:
                record, size = self._queue.popleft()
                self._batch.append(record)
                self._batch_bytes += size
            return True

    def _written(self) -> None:
        with self._changed:
            self._records += sum(isinstance(record, Request) for record in self._batch)
            self._batch = []
            self._bytes -= self._batch_bytes
            self._batch_bytes = 0
            if len(self._grammars) > _BATCH or not self._queue:
                named = {record.grammar for record, _ in self._queue if isinstance(record, Request)}
                self._grammars = {key: self._grammars[key] for key in self._grammars.keys() & named}

    def _works(self) -> None:
        if self._failure is not None:
            self._log.info("journal", message="the journal can be written again", file=str(self._file.path))
            self._failure = None  # whoever sees that finds the line in the log
        if self._file.problem != self._problem:
            self._problem = self._file.problem
            self._log.warning("journal", message=self._problem)

    def _fails(self, error: OSError) -> None:
        reason = f"{self._file.path}: {describe(error)}"
        if self._failure is None:
            effect = "new requests are refused" if self._config.required else "records wait, and are dropped in the end"
            self._log.error("journal", message=f"the journal cannot be written; {effect} until it can", reason=reason)
        with self._changed:
            self._failures += 1
            self._failure = reason

    def _wait_to_retry(self) -> bool:
        """False: the journal is closed, and there is no time for another try."""
        with self._changed:
            if self._closing:
                return False
            self._changed.wait_for(lambda: self._closing, _RETRY_S)
            return True


def _counts(record: Record) -> int:
    """How many requests a record that is lost stands for."""
    return record.records if isinstance(record, Dropped) else 1


def _request(ended: Ended, turn: Turn, completion: Sequence[int], bundle: str) -> Request:
    """The record of a request. The arrays of ids become lists when they are written."""
    request = turn.request
    tokens, params = turn.record or (b"", None)
    parameters = Parameters(
        max_tokens=params["max_tokens"],
        temperature=params["temperature"],
        top_k=params["top_k"],
        top_p=params["top_p"],
        min_p=params["min_p"],
        presence_penalty=params["presence_penalty"],
        frequency_penalty=params["frequency_penalty"],
        repetition_penalty=params["repetition_penalty"],
        seed=params["seed"],
        stop=request.stop,
        stop_ids=request.stop_ids,
        ignore_eos=request.ignore_eos,
        logit_bias=request.logit_bias,
        logprobs=request.logprobs,
        speculate=params["speculate"],
        max_tree=params["max_tree"],
        priority=request.priority,
        hold=request.hold,
        timeout_ms=request.timeout_ms,
        deadline_ms=request.deadline_ms,
    ) if params else None  # fmt: skip
    choices = request.choices
    labels = turn.labels or [[] for _ in choices or ()]  # which it has once it is submitted
    return Request(
        time=timestamp(),
        monotonic_ns=time.monotonic_ns(),
        client=ended.identity.hex(),
        id=ended.id,
        session=request.session,
        bundle=bundle,
        prompt=cast("list[int]", array("i", tokens)) if params else None,
        completion=cast("list[int]", completion if isinstance(completion, array) else list(completion)),
        parameters=parameters,
        choices=None
        if choices is None
        else [Label(text=text, ids=ids) for text, ids in zip(choices, labels, strict=True)],
        grammar=None if turn.grammar is None else turn.grammar.key,
        seed=ended.seed,
        finish_reason=ended.finish_reason,
        usage=ended.usage,
        timeline=ended.timeline,
        speculation=ended.speculation,
        choice=ended.choice,
        grammar_use=ended.grammar,
        error=ended.error,
        connection=ended.client,
        delivered=ended.delivered,
    )
