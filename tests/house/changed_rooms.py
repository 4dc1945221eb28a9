"""Tests of the rooms that changed, in about a minute: `python tests/house/changed_rooms.py`, see `make check`.

What changed is what git says against the merge base with the branch's upstream, or with main: commits, edits and new
files. Of a room's tests those run that say most in seconds; one line says which rooms of tests only `make test` runs.
Test files that changed run whatever they take, and so do those of the house. Linters, types and tests run side by side.
Status 1 if any of them fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FORMATTED = {".h", ".cpp", ".c", ".cu", ".cuh"}

# What begins with a path -> the tests that say most about it, and the rooms of tests that only `make test` runs.
# The longest path that fits counts.
ROOMS: dict[str, tuple[str, str]] = {
    "ull/client": ("tests/client/test_client_misuse.py tests/client/test_transport.py", "client commands daemon"),
    "clients": ("tests/clients", "clients"),
    "ull/voice": ("tests/voice/test_conversation.py", "voice"),
    "ull/gateway": (
        "tests/gateway/test_openai_client.py tests/gateway/test_gateway_tools.py tests/gateway/test_gateway_command.py",
        "gateway",
    ),
    "ull/daemon": (
        "tests/daemon/test_admission.py tests/daemon/test_control.py tests/daemon/test_config.py "
        "tests/daemon/test_metrics.py",
        "daemon client commands",
    ),
    "ull/metrics": ("tests/metrics tests/monitoring", "metrics gateway"),
    "ull/trace": ("tests/trace", "trace"),
    "ull/top": ("tests/top", "top"),
    "ull/doctor": ("tests/doctor", "doctor"),
    "ull/install": ("tests/install tests/daemon/test_systemd.py", "install"),
    "ull/commands": ("tests/commands/test_golden.py", "commands"),
    "ull/bundle": ("tests/bundle", "build core daemon gpu"),
    "ull/text": (
        "tests/text/test_tokenizer.py tests/text/test_tokenize.py tests/text/test_template_process.py",
        "text",
    ),
    "ull/gpu": (
        "tests/kernels/test_params.py tests/gpu/test_gpu_launches.py tests/gpu/test_gpu_capture.py",
        "gpu kernels",
    ),
    "ull/kernels": ("tests/kernels/test_params.py tests/kernels/test_kernel_plain.py", "kernels gpu"),
    "ull/kernels/dflash": ("tests/kernels/test_kernel_dflash.py", "kernels gpu"),
    "ull/kernels/eagle": ("tests/kernels/test_kernel_eagle.py", "kernels gpu"),
    "ull/kernels/linear": ("tests/kernels/test_kernel_layers.py tests/kernels/test_params.py", "kernels gpu"),
    "ull/kernels/medusa": ("tests/kernels/test_kernel_medusa.py", "kernels gpu"),
    "ull/native": (
        "tests/core/test_native_stub.py tests/core/test_engine.py tests/core/test_executor.py",
        "core daemon",
    ),
    "ull/native/draft": ("tests/core/test_drafters.py", "core daemon"),
    "ull/native/io": ("tests/core/test_io.py tests/client/test_transport.py", "core client daemon"),
    "ull": ("tests/wire", "client daemon commands"),
    "build/ull_build": ("tests/build/test_source.py tests/build/test_checkpoint.py", "build tensorrt_plans"),
    "build/ull_build/train": ("tests/build/test_train.py", "build"),
    "build/ull_build/tensorrt": ("tests/tensorrt_plans/test_plan_check.py", "tensorrt_plans"),
    "bench": ("tests/bench/test_bench_h200_machine.py", "bench"),
    "docs": ("tests/wire/test_wire_page.py", ""),
    "systemd": ("tests/daemon/test_systemd.py", ""),
    "tests/rigs": ("", "all"),
    "tests/doubles": ("tests/gpu/test_fakecuda.py", "gpu kernels tensorrt_plans"),
}


def changed_files() -> list[str]:
    """What differs from where the branch left its upstream, or main; everything that is new counts, too."""
    base = next(
        (found for other in ("@{upstream}", "origin/main", "main") if (found := _git("merge-base", "HEAD", other))),
        "HEAD",
    )
    names = {
        *_git("diff", "--name-only", base).split("\n"),
        *_git("ls-files", "--others", "--exclude-standard").split("\n"),
    }
    return sorted(names - {""})


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def room_of(name: str) -> str | None:
    """The room of ROOMS that a file belongs to."""
    fitting = [room for room in ROOMS if name.startswith(f"{room}/")]
    return max(fitting, key=len, default=None)


def tests_for(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tests to run now, and the rooms of tests that `make test` runs beyond them."""
    run, beyond = {"tests/house"}, set()
    for name in names:
        path = Path(name)
        if path.name.startswith("test_") and path.suffix == ".py":
            run |= {name} if (ROOT / name).exists() else set()
        elif room := room_of(name):
            quick, others = ROOMS[room]
            run |= set(quick.split())
            beyond |= set(others.split())
    return sorted(run), sorted(beyond)


def native_rooms(names: Iterable[str]) -> set[str]:
    """The rooms of the core whose own tests are to run."""
    parts = [Path(name).parts for name in names if name.startswith(("ull/native/", "tests/native/"))]
    return {part[2] for part in parts if len(part) > 3}


def jobs_for(names: list[str]) -> dict[str, str]:
    """Name -> shell command of what runs side by side."""
    run, beyond = tests_for(names)
    formatted = [name for name in names if Path(name).suffix in FORMATTED and (ROOT / name).exists()]
    jobs = {
        "ruff": f"{BIN}/python -m ruff check . && {BIN}/python -m ruff format --check .",
        "mypy": f"{BIN}/python -m mypy",
        "tests": f"{BIN}/python -m pytest -q -n 2 --dist loadfile --maxfail 5 {' '.join(run)}",
    }
    if formatted:
        jobs["clang-format"] = f"{BIN}/clang-format --dry-run -Werror {' '.join(formatted)}"
    if rooms := native_rooms(names):
        programs = sorted(path.stem for room in rooms for path in (ROOT / "tests/native" / room).glob("test_*.cpp"))
        beyond.append("native")
        if programs:
            jobs["native"] = _native_command(programs)
    print("checking:", *run, *(["and native", *sorted(rooms)] if rooms else []))
    print("only `make test` runs all of:", *beyond or ["nothing that changed"])
    return jobs


def _native_command(programs: list[str]) -> str:
    return (
        f"build=$(dirname .cache/cmake/*/build.ninja) && {BIN}/cmake --build $build --target {' '.join(programs)} && "
        f"{BIN}/ctest --test-dir $build --output-on-failure -R '^({'|'.join(programs)})$'"
    )


def main() -> int:
    started = time.monotonic()
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    running = {
        name: subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, command in jobs_for(changed_files()).items()
    }
    failed = []
    for name, process in running.items():
        said = process.communicate()[0]
        if process.returncode != 0:
            failed.append(name)
            print(f"== {name} failed\n{said}")
        print(
            f"== {name}: {'failed' if process.returncode else 'well'} after {time.monotonic() - started:.0f} s",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
