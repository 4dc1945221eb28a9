"""The command line of `ulld`, and what can go wrong before there is a daemon.

What takes long to import comes in only once signals are heard.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ull import __version__
from ull.completion import add_completion
from ull.daemon.config import load_config, parse_override
from ull.daemon.process import Signals, Stopped, log_descriptor, raise_descriptor_limit, say
from ull.daemon.succession import Predecessor
from ull.errors import ConfigError, UllError
from ull.log import Log, LogQueue

EXIT_CANNOT_START = 1
DESCRIPTORS = 48  # what a daemon with a few endpoints holds open, and some clients


def run(arguments: Sequence[str]) -> int:
    """Serves as the command line says. Returns the exit status."""
    options = parser().parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signals = Signals()
    queue: LogQueue | None = None
    predecessor: Predecessor | None = None
    try:
        predecessor = Predecessor.from_environment()
        config = load_config(options.config, _overrides(options))
        raise_descriptor_limit(DESCRIPTORS)
        from ull.daemon import server  # takes a third of a second

        queue = LogQueue(log_descriptor(), config.log.format)
        log = Log(config.log.level, config.log.format, queue)
        log.prompts = config.log.prompts
        return server.run(options.bundle, config, log, signals, predecessor=predecessor)
    except Stopped as stopped:
        say(str(stopped))
        return 0
    except UllError as error:
        reason = error.message
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        reason = f"cannot start: {error or type(error).__name__}"
    finally:
        if queue is not None:
            queue.close(server.FLUSH_S)
    say(reason)
    if predecessor is not None:
        predecessor.fail(reason)
    signals.give_back()
    return EXIT_CANNOT_START


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser("ulld", description="Serves an engine bundle over ZeroMQ.")
    command.add_argument("bundle", type=Path, help="the engine bundle, a directory written by ull-build")
    command.add_argument(
        "--listen", action="append", metavar="URL", help="ipc:///path or tcp://address:port; repeatable"
    )
    command.add_argument("--config", type=Path, metavar="FILE", help="TOML file (see `ull config --defaults`)")
    command.add_argument(
        "--cores",
        metavar="LIST",
        help="pinned cores: the computing threads' (the engine thread's first), then the io thread's, e.g. 2,3,4",
    )
    command.add_argument("--threads", type=int, metavar="N", help="computing threads (engine.threads)")
    command.add_argument("--context", type=int, metavar="N", help="tokens of one request (engine.context)")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration")
    command.add_argument("--version", action="version", version=f"ulld {__version__}")
    add_completion(command)
    return command


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    """The configuration keys that the command line sets."""
    values: dict[str, Any] = dict(parse_override(assignment) for assignment in options.set)
    if options.listen:
        values["listen"] = options.listen
    if options.threads is not None:
        values["engine.threads"] = options.threads
    if options.context is not None:
        values["engine.context"] = options.context
    if options.cores is not None:
        values |= _core_overrides(options.cores)
    return values


def _core_overrides(text: str) -> dict[str, Any]:
    """`--cores 2,3,4`: cores 2 and 3 compute (the engine thread on 2), io runs on 4. One core alone is the engine's."""
    try:
        cores = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--cores takes numbers like 2,3,4, not {text!r}", "cores") from None
    computing = cores[:-1] or cores
    values: dict[str, Any] = {"engine.core": computing[0], "engine.cores": computing}
    return values | ({"io.core": cores[-1]} if len(cores) > 1 else {})
