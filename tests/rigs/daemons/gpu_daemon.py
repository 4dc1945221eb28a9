"""`ulld` on a bundle that says it is for a GPU, with a played graph program and a scripted executor in place of both.

Environment: ULL_TEST_SCRIPT as for scripted_daemon.py; ULL_TEST_GPU a JSON object: `folder`, where the calls that the
program got are noted; `error`, the message of a GpuError-like refusal to load.
"""

import dataclasses
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import msgspec

from scripted_daemon import leave_rehearsal_out, scripted
from ull import _native
from ull.bundle import Bundle, Speculation
from ull.daemon import __main__ as ulld
from ull.daemon import server
from ull.errors import UllError

GPU = json.loads(os.environ.get("ULL_TEST_GPU", "{}"))
open_bundle = server.open_bundle


def note(call: str, **details: Any) -> None:
    with (Path(GPU["folder"]) / "calls").open("a") as calls:
        print(json.dumps({"call": call, **details}), file=calls)


class Program:
    """What `ull.gpu.program.Program` looks like from the daemon."""

    def __init__(
        self, bundle: Bundle, log: Any, context: int, pages: int | None, device: int, persistent: bool
    ) -> None:
        if "error" in GPU:
            raise UllError("no_gpu", GPU["error"])
        note("load", target=bundle.manifest.target, context=context, pages=pages, device=device, persistent=persistent)

    @property
    def handover(self) -> dict[str, Any]:
        return {"vocabulary": 1088, "context_tokens": 128}

    def abandon(self) -> None:
        note("abandon")

    def close(self) -> None:
        note("close")


def graph_executor(program: dict[str, Any], **options: Any) -> _native.ScriptedExecutor:
    remembered = options.pop("past_outputs") is not None
    note("execute", **options, past_outputs=remembered)
    return scripted({"vocabulary": program["vocabulary"], "context": program["context_tokens"]})


def gpu_bundle(*arguments: Any) -> Bundle:
    bundle = open_bundle(*arguments)
    manifest = msgspec.structs.replace(bundle.manifest, speculation=Speculation(default="suffix", max_tree=16))
    msgspec.structs.force_setattr(manifest, "target", "sm_90a")  # though there are no kernels
    return dataclasses.replace(bundle, manifest=manifest)


if __name__ == "__main__":
    module = types.ModuleType("ull.gpu.program")
    module.Program = Program  # type: ignore[attr-defined]
    sys.modules["ull.gpu.program"] = module
    _native.GraphExecutor = graph_executor  # type: ignore[assignment,misc]
    server.open_bundle = gpu_bundle
    leave_rehearsal_out()
    sys.exit(ulld.main())
