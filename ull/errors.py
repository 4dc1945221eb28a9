"""Every error that ull raises on purpose. Each says what is wrong and, where there is one, the remedy.

`UllError(code, message, field=None)` is the base. `code` is a short stable word for programs, `message` one or two
sentences for people, `field` the key, tensor or file that is at fault. Classes whose code never varies take
`(message, field=None)`. Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations


class UllError(Exception):
    """Base of all errors of ull: `code` for programs, `message` for people, `field` names what is at fault."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.code, self.message, self.field))

    def __str__(self) -> str:
        return self.message

    def copy(self) -> UllError:
        """The same error without a traceback, to be raised once more elsewhere."""
        return _rebuild(type(self), self.code, self.message, self.field)


def _rebuild(kind: type[UllError], code: str, message: str, field: str | None) -> UllError:
    """Unpickles an error without calling the constructor of its class, whose arguments differ."""
    error = kind.__new__(kind, message)
    UllError.__init__(error, code, message, field)
    return error


class _FixedCodeError(UllError):
    """An error whose class alone decides its code."""

    fixed_code = "internal"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(self.fixed_code, message, field)


class BundleError(_FixedCodeError):
    """An engine bundle is missing, truncated, corrupt, foreign or newer than this version reads."""

    fixed_code = "bad_bundle"


class CheckpointError(_FixedCodeError):
    """A checkpoint cannot be built: unsupported, incomplete or damaged."""

    fixed_code = "bad_checkpoint"


class RecipeError(_FixedCodeError):
    """A recipe has an unknown key or a value out of its range."""

    fixed_code = "bad_recipe"


class BuildError(_FixedCodeError):
    """A build cannot finish: output in the way, quality below the recipe's limit, target not available."""

    fixed_code = "build_failed"


class ConfigError(_FixedCodeError):
    """The daemon's configuration has an unknown key or a value out of its range."""

    fixed_code = "bad_config"


class TokenizerError(_FixedCodeError):
    """The bundle's tokenizer or chat template cannot be loaded or applied."""

    fixed_code = "bad_tokenizer"


class RequestError(UllError):
    """A request was refused; `code` is one of the wire's error codes, `field` the field at fault (or None)."""


class Busy(RequestError):
    """The daemon's queue is full, or this client's share of it; `retry_after` (seconds) says when to try again.

    It is an estimate from how long requests take and how many wait (`queue_length`); None if the daemon makes none.
    """

    def __init__(
        self,
        message: str = "the queue is full",
        field: str | None = None,
        retry_after: float | None = None,
        queue_length: int | None = None,
    ) -> None:
        super().__init__("busy", message, field)
        self.retry_after = retry_after
        self.queue_length = queue_length

    def __reduce__(self) -> tuple[object, ...]:
        return (Busy, (self.message, self.field, self.retry_after, self.queue_length))

    def copy(self) -> Busy:
        """The same error without a traceback, to be raised once more elsewhere."""
        return Busy(self.message, self.field, self.retry_after, self.queue_length)


class DeadlineUnreachable(RequestError):
    """The answer cannot be there by the request's deadline; `expected` (seconds from receipt) says when it would be."""

    def __init__(
        self,
        message: str = "the deadline cannot be met",
        field: str | None = "deadline_ms",
        expected: float | None = None,
    ) -> None:
        super().__init__("deadline_unreachable", message, field)
        self.expected = expected

    def __reduce__(self) -> tuple[object, ...]:
        return (DeadlineUnreachable, (self.message, self.field, self.expected))

    def copy(self) -> DeadlineUnreachable:
        """The same error without a traceback, to be raised once more elsewhere."""
        return DeadlineUnreachable(self.message, self.field, self.expected)


class Draining(RequestError):
    """The daemon is shutting down and takes no new requests."""

    def __init__(self, message: str = "the daemon is draining", field: str | None = None) -> None:
        super().__init__("draining", message, field)


class Forbidden(RequestError):
    """The client may not ask for this: it is for the role admin."""

    def __init__(self, message: str = "this is for the role admin", field: str | None = None) -> None:
        super().__init__("forbidden", message, field)


class JournalUnavailable(RequestError):
    """The daemon must keep a record of every request, and cannot write any at the moment."""

    def __init__(self, message: str = "the journal cannot be written", field: str | None = None) -> None:
        super().__init__("journal_unavailable", message, field)


class JournalError(_FixedCodeError):
    """A file is no journal, or its chain of records is broken."""

    fixed_code = "bad_journal"


class InvalidGrammar(RequestError):
    """A schema, a regular expression or a grammar that cannot be compiled; `field` says which, the message why."""

    def __init__(self, message: str = "the grammar is not valid", field: str | None = None) -> None:
        super().__init__("invalid_grammar", message, field)


class ConnectionLost(_FixedCodeError):
    """The daemon went away, or never answered, while a request was in flight."""

    fixed_code = "connection_lost"


class RequestTimeout(_FixedCodeError):
    """The client's own time limit for an answer has passed."""

    fixed_code = "timeout"


class UsageError(_FixedCodeError):
    """A client is used where it does not belong: in another thread, event loop or process than its own."""

    fixed_code = "bad_usage"


class RequestFailed(UllError):
    """An accepted request ended early because the engine failed; what it had produced is in `partial`."""

    partial: object = None  # ull.Result; typed loosely because errors stand below everything else


class DaemonError(_FixedCodeError):
    """The daemon cannot start or go on: its socket is taken, memory cannot be locked, the engine failed."""

    fixed_code = "daemon_failed"


class GpuError(UllError):
    """The GPU cannot run the engine, or TensorRT is not there to build or run it.

    `code` is one of no_gpu, wrong_gpu, old_driver, gpu_memory, bad_code, gpu_failed, no_tensorrt, old_tensorrt,
    wrong_tensorrt.
    `field` is the name of the CUDA driver's error, if it was the driver that refused.
    """
