"""What went wrong, as OpenAI's clients read it: an HTTP status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from ull.errors import Busy, ConnectionLost, DeadlineUnreachable, RequestTimeout, UllError

# Status and type by the code of an error; others that a request brings are its own fault.
_KINDS: Mapping[str, tuple[int, str]] = {
    "busy": (429, "rate_limit_error"),
    "too_many_sessions": (429, "rate_limit_error"),
    "draining": (503, "server_error"),
    "journal_unavailable": (503, "server_error"),
    "connection_lost": (503, "server_error"),
    "stalled": (503, "server_error"),
    "timeout": (504, "server_error"),
    "internal": (500, "server_error"),
    "grammar_failed": (500, "server_error"),
}
# What a field of the wire is called at the door.
_PARAMS: Mapping[str, str] = {
    "deadline_ms": "deadline",
    "timeout_ms": "timeout",
    "json_schema": "response_format",
    "json_object": "response_format",
    "token_ids": "prompt",
    "stop_ids": "stop_token_ids",
}


class HttpError(UllError):
    """A request that cannot be served: its HTTP status, and what OpenAI's clients are told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(code or "bad_request", message, param)
        self.status = status
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The response's body, also that of an event within a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str = "bad_request") -> HttpError:
    """The request is at fault, and says so in `param`."""
    return HttpError(400, message, code=code, param=param)


def unreadable(error: Exception) -> HttpError:
    """The body is no JSON, or not of the form that the door takes."""
    if isinstance(error, msgspec.ValidationError):
        reason, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`")
        if "missing required field" in reason:
            field = f"{field}.{reason.rsplit('`', 2)[-2]}".removeprefix(".")
        return bad_request(f"{field}: {reason}" if field else reason, field or None)
    if isinstance(error, RecursionError):
        return bad_request("the body is nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return bad_request("the body is not valid UTF-8")
    return bad_request(f"the body is no JSON: {error}")


def as_http(error: Exception) -> HttpError:
    """Any error of a request, as what its client is told."""
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, UllError):
        return HttpError(500, "the gateway failed; its log says why", code="internal", kind="server_error")
    if error.code == "too_long":
        return bad_request(error.message, error.field, "context_length_exceeded")
    status, kind = _KINDS.get(error.code, (400, "invalid_request_error"))
    message, headers = error.message, {}
    if isinstance(error, Busy) and error.retry_after is not None:
        headers = {
            "retry-after": str(max(1, math.ceil(error.retry_after))),
            "retry-after-ms": str(max(1, math.ceil(error.retry_after * 1000))),
        }
    if isinstance(error, DeadlineUnreachable) and error.expected is not None:
        message = f"{message} (expected after {error.expected:.3f} s)"
    if isinstance(error, ConnectionLost | RequestTimeout):
        headers = {"retry-after": "1"}
    field = None if error.field is None else _PARAMS.get(error.field, error.field)
    return HttpError(status, message, code=error.code, param=field, kind=kind, headers=headers)
