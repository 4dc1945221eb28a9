"""The child process that fetches from the Hugging Face Hub: a JSON request as its argument, a JSON answer on stdout.

The answer has the snapshot's `directory`, and `cached`, why it is the cache's, where that is so; or a `failure` (its
kind, which `hub.py` puts into words) and `text` about it. The child ends when its stdin does, so with its parent.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ull_build.source.foreign import why_no_weights

_TIMEOUT_S = 10.0  # of the first request; the downloads have the library's


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer = _answer(json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # threads of the library may still wait for the network


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import RevisionNotFoundError
    except ImportError as error:
        return {"failure": "package", "text": _line(error)}
    repository, revision = request["repository"], request["revision"]
    options: dict[str, Any] = {
        "repo_id": repository,
        "revision": revision,
        "library_name": "ull",
        "allow_patterns": request["first"],
        "ignore_patterns": request["ignored"],
    }
    why: Exception | None = None
    if not constants.HF_HUB_OFFLINE:
        try:
            info = HfApi().model_info(repository, revision=revision, timeout=_TIMEOUT_S)
        except RevisionNotFoundError as error:
            return _failure(error, "revision")
        except Exception as error:  # the library has many, of several other libraries
            why = error
        else:
            names = [file.rfilename for file in info.siblings or []]
            if request["whole_model"] and (reason := why_no_weights(names, repository, info.tags or [])) is not None:
                return {"failure": "useless", "text": reason}
            if not _has_any(names, [*request["first"][1:], *request["instead"]], request["ignored"]):
                wanted = ", ".join([*request["first"], *request["instead"]])
                return {"failure": "useless", "text": f"{repository} has none of the files that are read: {wanted}"}
            weights = [pattern for pattern in request["first"] if pattern.endswith(".safetensors")]
            if not _has_any(names, weights, request["ignored"]):
                options["allow_patterns"] = [*request["first"], *request["instead"]]
            try:
                return {"directory": snapshot_download(**options)}
            except Exception as error:
                return _failure(error, "broken")
    try:
        directory = snapshot_download(**options, local_files_only=True)
    except Exception:
        return {"failure": "offline"} if why is None else _failure(why, "unreachable")
    return {"directory": directory, "cached": "HF_HUB_OFFLINE is set" if why is None else _reason(why)}


def _has_any(names: Sequence[str], patterns: Sequence[str], ignored: Sequence[str]) -> bool:
    return any(
        any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
        for name in names
    )


def _failure(error: Exception, otherwise: str) -> dict[str, Any]:
    """What to answer to an error of the library's; `otherwise` is the kind of one that is none of its own."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # From the particular to the general: the first are kinds of the last.
    kinds = {
        GatedRepoError: "gated",
        RepositoryNotFoundError: "unknown",
        RevisionNotFoundError: "revision",
        LocalEntryNotFoundError: "broken",
        HfHubHTTPError: "refused",
    }
    kind = next((kind for error_type, kind in kinds.items() if isinstance(error, error_type)), otherwise)
    return {"failure": kind, "text": _line(error)}


def _reason(error: Exception) -> str:
    kind = _failure(error, "unreachable")["failure"]
    said = {"gated": "the Hub refuses access", "unknown": "the Hub does not know it (any more), or refuses access"}
    return said.get(kind, f"the Hub cannot be reached ({_line(error)})")


def _line(error: Exception) -> str:
    """The first line of what an error says, with its name where it says nothing."""
    text = str(error).strip().partition("\n")[0].strip()
    return (text or type(error).__name__)[:200]


if __name__ == "__main__":
    main()
