"""`ulld`: loads an engine bundle, serves it, drains and stops. Requests are `ull.control`'s, tokens the native core's.

Exit status: 0 after a clean stop, 1 if it could not start (one line on standard error says why), 3 if the engine
failed for good, so that someone must look at the machine (a GPU that needs a reset; systemd/ull@.service does not
restart it then), 4 if it failed in a way that a restart may mend.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop
import zmq

from ull import __version__, _native
from ull.admission import Admission, Limits
from ull.bundle import Bundle, open_bundle
from ull.config import Config, ipc_path, load_config, parse_override
from ull.control import ControlPlane
from ull.errors import ConfigError, DaemonError, UllError
from ull.executors import open_executor, runs_on_gpu
from ull.host import auto_threads, keep_off, loaded_libzmq, lock_memory
from ull.log import Log
from ull.sockets import SocketClaim
from ull.tokenizer import Tokenizer

EXIT_CANNOT_START = 1
EXIT_ENGINE_FAILED = 3
EXIT_RESTART = 4
CONTROL_ENDPOINT = "inproc://ull-control"

_EXECUTOR_FIGURES = ("drafter_weight_bytes", "drafter_kv_bytes", "verify_ns", "draft_ns")
_TICK_S = 0.02  # how often the state of engine and drain is looked at
_CANCEL_S = 2.0  # after the drain timeout, for cancelled requests to end
_STOP_S = 10.0  # for native threads to stop, before the process ends without them


class Daemon:
    """One engine and its threads, from the loaded bundle to the last frame.

    The constructor blocks until the engine is warm and the endpoints are bound. Raises UllError if anything is in
    the way; what had been acquired is released.
    """

    def __init__(self, bundle: Bundle, config: Config, log: Log) -> None:
        self.config = config
        self._log = log
        self._terminations = 0
        self._exit = ExitStack()  # what close() undoes, last first
        with ExitStack() as exit_stack:
            self._start(bundle, exit_stack)
            self._exit = exit_stack.pop_all()

    async def serve(self) -> int:
        """Serves until SIGTERM or SIGINT has been honoured, or the engine has failed; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._terminate)
        loop.add_signal_handler(signal.SIGHUP, self._refuse_reload)
        self._control.start()
        self._announce()
        while self._terminations == 0:
            if self._engine.health() == "failed":
                return await self._fail()
            await asyncio.sleep(_TICK_S)
        return await self._drain()

    def close(self) -> None:
        """Stops the native threads and removes the sockets. A thread that hangs costs the process, not the exit."""
        last_resort = threading.Timer(_STOP_S, os._exit, (self._status() or 1,))
        last_resort.daemon = True
        last_resort.start()
        self._exit.close()
        gc.unfreeze()
        last_resort.cancel()

    def _start(self, bundle: Bundle, exit_stack: ExitStack) -> None:
        """Sockets claimed, memory locked, engine warm, endpoints bound, control plane connected, in this order."""
        config, started_ns = self.config, time.monotonic_ns()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        claims = self._claim_sockets(exit_stack)
        exit_stack.callback(context.destroy, 0)
        self._settle(context)
        tokenizer = Tokenizer(bundle.tokenizer_directory)
        executor = self._load_engine(bundle, exit_stack)
        limits = self._limits(bundle)
        self._io = self._open_io(context)
        exit_stack.callback(self._io.stop)
        exit_stack.callback(self._engine.stop)  # before io, which delivers the last frames
        socket = context.socket(zmq.PAIR)
        exit_stack.callback(socket.close, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(CONTROL_ENDPOINT)  # before the first request can arrive
        mask = os.umask(0o777 & ~config.ipc_mode)
        try:
            self._io.start()
        finally:
            os.umask(mask)
        for claim in claims:
            claim.path.chmod(config.ipc_mode)
        start_ns = time.monotonic_ns() - started_ns
        self._control = ControlPlane(
            socket,
            self._engine,
            self._io,
            Admission(tokenizer, limits, bundle.manifest.tokens.eos),
            self._log,
            engine_summary=_summary(bundle),
            executor_summary={**executor, "start_ns": start_ns},
            queue_depth=config.engine.queue_depth,
        )
        exit_stack.callback(self._control.close)
        self._ready = {
            "name": bundle.manifest.name,
            "listen": ",".join(self._io.endpoints),
            "pid": os.getpid(),
            "context": limits.context,
            "executor": executor["name"],
            "start_ms": start_ns // 1_000_000,
        }
        gc.collect()
        gc.freeze()  # what is alive now stays alive: later collections need not look at it

    def _limits(self, bundle: Bundle) -> Limits:
        """What requests may ask for. Raises DaemonError where the configured drafter is not in the bundle."""
        config, engine = self.config, self._engine.info
        drafters, drafter = tuple(engine["drafters"]), config.speculation.default
        if drafter == "bundle":
            drafter = engine["default_drafter"]
        elif drafter not in drafters:
            offered = ", ".join(drafters)
            raise DaemonError(
                f"speculation.default: {drafter!r} is not in this bundle; it offers {offered}", "speculation.default"
            )
        return Limits(
            context=int(engine["context"]),
            vocabulary=bundle.manifest.model.vocabulary,
            default_max_tokens=config.requests.default_max_tokens,
            max_tokens=config.requests.max_tokens_limit,
            drafters=drafters,
            default_drafter=drafter,
            default_max_tree=config.speculation.max_tree or int(engine["default_max_tree"]),
            penalties=bool(engine["penalties"]),
        )

    def _claim_sockets(self, exit_stack: ExitStack) -> list[SocketClaim]:
        claims = []
        for endpoint in self.config.listen:
            if (path := ipc_path(endpoint)) is not None:
                claims.append(SocketClaim(path, self.config.ipc_mode))
                exit_stack.callback(claims[-1].release)
        return claims

    def _settle(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Keeps this thread, and libzmq's, off the pinned cores, and memory out of swap."""
        engine, io = self.config.engine, self.config.io
        hot = {*engine.cores, *(core for core in (engine.core, io.core) if core >= 0)}
        self._threads = engine.threads or len(engine.cores) or auto_threads()
        keep_off(hot)
        if hot:
            for core in sorted(os.sched_getaffinity(0)):
                context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        self._lock_memory()

    def _load_engine(self, bundle: Bundle, exit_stack: ExitStack) -> dict[str, Any]:
        """Loads the weights and warms the engine up; returns what `info` says about the executor."""
        config = self.config.engine
        self._executor = executor = open_executor(bundle, self.config, self._threads, self._log, exit_stack)
        self._engine = _native.Engine(
            executor,
            str(bundle.vocabulary_path),
            queue_depth=config.queue_depth,
            core=config.core,
            idle=config.idle,
            watchdog_ms=config.watchdog_ms,
            max_sessions=config.sessions,
            prefix_cache=config.prefix_cache,
            slow_cycle_us=config.slow_cycle_us,
        )
        exit_stack.callback(self._engine.stop)
        self._engine.warm_up()
        self._engine.start()
        return {
            "name": executor.name,
            "threads": 1 if runs_on_gpu(bundle) else self._threads,
            "weight_bytes": executor.weight_bytes,
            "kv_bytes": executor.kv_bytes,
            **{name: self._engine.info[name] for name in _EXECUTOR_FIGURES},
        }

    def _open_io(self, context: zmq.Context[zmq.Socket[bytes]]) -> _native.Io:
        config = self.config.io
        return _native.Io(
            self._engine,
            zmq_context=context.underlying,
            libzmq=loaded_libzmq(),
            listen=[endpoint.replace("tcp://localhost:", "tcp://127.0.0.1:") for endpoint in self.config.listen],
            control=CONTROL_ENDPOINT,
            core=config.core,
            idle=config.idle,
            send_hwm=config.send_hwm,
            client_stall_ms=config.client_stall_ms,
            max_message=config.max_message_bytes,
        )

    def _lock_memory(self) -> None:
        if self.config.lock_memory == "off":
            return
        problem = lock_memory()
        if problem is not None and self.config.lock_memory == "require":
            raise DaemonError(f"lock_memory is required, but {problem}", "lock_memory")
        if problem is not None:
            self._log.warning("memory", message=f"memory is not locked, pages may be swapped out: {problem}")

    def _announce(self) -> None:
        line = " ".join(f"{name}={value}" for name, value in self._ready.items())
        print(f"READY {line}", flush=True)
        _native.notify(f"READY=1\nMAINPID={os.getpid()}\nSTATUS=serving {line}")
        self._log.info("ready", version=__version__, **self._ready)

    def _terminate(self) -> None:
        self._terminations += 1
        if self._terminations > 1:
            self._log.warning("draining", message="second signal: cancelling what still runs")

    def _refuse_reload(self) -> None:
        self._log.warning(
            "reload",
            message="SIGHUP is not supported: memory and threads are laid out at start; restart to reconfigure",
        )

    async def _drain(self) -> int:
        """Refuses what is new, lets what was accepted finish, then cancels; a second signal skips the waiting."""
        _native.notify("STOPPING=1\nSTATUS=draining")
        control, timeout_s = self._control, self.config.drain_timeout_s
        control.draining = True
        self._log.info("draining", live=control.live, timeout_s=timeout_s)
        loop = asyncio.get_running_loop()
        await self._until_idle(loop.time() + timeout_s, hurry=True)
        cancelled = control.live
        if cancelled:
            control.cancel_all()
            await self._until_idle(loop.time() + _CANCEL_S, hurry=False)
        self._log.info("stopped", cancelled=cancelled, unfinished=control.live, **self._totals())
        return self._status()

    async def _until_idle(self, deadline: float, hurry: bool) -> None:
        """Waits for the last accepted request to end, until `deadline`, or a second signal if `hurry`."""
        loop = asyncio.get_running_loop()
        while self._control.live and loop.time() < deadline and not (hurry and self._terminations > 1):
            await asyncio.sleep(_TICK_S)

    async def _fail(self) -> int:
        """The engine cannot go on: its requests have been ended by the core; give their last frames time to leave."""
        reason = self._executor.failure or "the executor cannot say why"
        remedy = "restart it" if self._executor.restart_helps else "look at the machine before it is started again"
        self._log.error("engine", message=f"the engine has failed; stopping: {remedy}", reason=reason, **self._totals())
        _native.notify(f"STOPPING=1\nSTATUS=engine failed: {reason}")
        self._control.draining = True
        await self._until_idle(asyncio.get_running_loop().time() + _CANCEL_S, hurry=False)
        return self._status()

    def _status(self) -> int:
        """The exit status of a daemon whose engine is as it is now."""
        if self._engine.health() != "failed":
            return 0
        return EXIT_RESTART if self._executor.restart_helps else EXIT_ENGINE_FAILED

    def _totals(self) -> dict[str, Any]:
        metrics = self._control.metrics
        return {"accepted": metrics.accepted, "refused": sum(metrics.refused.values())}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `ulld`. Returns the exit status."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        config = load_config(options.config, _overrides(options))
        log = Log(config.log.level, config.log.format)
        daemon = Daemon(open_bundle(options.bundle, config.verify), config, log)
    except UllError as error:
        print(f"ulld: {error.message}", file=sys.stderr)
        return EXIT_CANNOT_START
    except (ValueError, RuntimeError, MemoryError, OSError) as error:  # of the native core: what it says is the reason
        print(f"ulld: cannot start: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(daemon.serve())
    finally:
        daemon.close()


def _summary(bundle: Bundle) -> dict[str, Any]:
    """What `info` says about the engine."""
    manifest = bundle.manifest
    model, forward = manifest.model, manifest.forward
    quality = manifest.calibration if forward.uses("tensorrt") and manifest.calibration else manifest.quality
    return {
        "name": manifest.name,
        "created": manifest.created,
        "target": manifest.target,
        "ull_version": manifest.ull_version,
        "architecture": model.architecture,
        "layers": model.layers,
        "hidden": model.hidden,
        "vocabulary": model.vocabulary,
        "precision": {"weights": manifest.precision.weights, "lm_head": manifest.precision.lm_head},
        "forward": {"prefill": forward.prefill, "decode": forward.decode, "attention": forward.attention},
        "tokens": {"bos": manifest.tokens.bos, "eos": manifest.tokens.eos},
        "chat_template": manifest.tokens.chat_template,
        "perplexity_increase": None if quality is None else quality.perplexity_increase,
        "source_sha256": manifest.provenance.source_sha256,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ulld", description="Serves an engine bundle over ZeroMQ.")
    parser.add_argument("bundle", type=Path, help="the engine bundle, a directory written by ull-build")
    parser.add_argument(
        "--listen", action="append", metavar="URL", help="ipc:///path or tcp://address:port; repeatable"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file (see `ull config --defaults`)")
    parser.add_argument(
        "--cores",
        metavar="LIST",
        help="pinned cores: the computing threads' (the engine thread's first), then the io thread's, e.g. 2,3,4",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="computing threads (engine.threads)")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of one request (engine.context)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration")
    parser.add_argument("--version", action="version", version=f"ulld {__version__}")
    return parser


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


if __name__ == "__main__":
    sys.exit(main())
