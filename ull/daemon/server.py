"""The daemon: loads an engine bundle, serves it, drains, stops. Requests are `ull.daemon.control`'s, tokens the
native core's.

Exit status: 0 after a clean stop, whenever it was asked for; 1 if it could not start (one line on standard error says
why); 3 if the engine failed for good, so that someone must look at the machine (a GPU that needs a reset;
systemd/ull@.service does not restart it then); 4 if it failed, or did not stop in time, and a restart may mend it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop
import zmq

from ull import __version__, _native
from ull.access import denial
from ull.bundle import Bundle, Calibration, FastPrefill, Quality, open_bundle
from ull.cores import core_list
from ull.daemon.admission import Admission, Limits
from ull.daemon.config import PAGE_TOKENS, Config, EngineConfig
from ull.daemon.control import ControlPlane
from ull.daemon.exclusive import Exclusive
from ull.daemon.executors import open_executor, runs_on_gpu
from ull.daemon.grammars import Grammars, library_path
from ull.daemon.guests import Guests
from ull.daemon.host import (
    auto_threads,
    check_address_space,
    lock_memory,
    move_threads,
    pin,
    prioritise,
    quick_wake_ups,
    return_large_blocks,
)
from ull.daemon.past_outputs import PastOutputsFile, vocabulary_digest
from ull.daemon.placement import CoreClaims, place
from ull.daemon.process import Signals, announce
from ull.daemon.rehearsal import rehearse
from ull.daemon.socket_claim import SocketClaim
from ull.daemon.succession import Ended, Predecessor, Ready
from ull.daemon.upgrade import Holdings, Upgrade, inherit
from ull.endpoints import default_endpoint, ipc_path
from ull.errors import ConfigError, DaemonError, Draining, RequestError
from ull.journal import Header
from ull.libzmq import loaded_libzmq
from ull.log import Log
from ull.machine import this_machine
from ull.text.tokenizer import Tokenizer
from ull.wire import longest_request

EXIT_ENGINE_FAILED = 3
EXIT_RESTART = 4
CONTROL_ENDPOINT = "inproc://ull-control"

_EXECUTOR_FIGURES = ("drafter_weight_bytes", "drafter_kv_bytes", "verify_ns", "draft_ns")
_LAST_CALL_S = 0.1  # what was sent before SIGTERM may still be on its way
_CANCEL_S = 2.0  # after the drain timeout, for cancelled requests to end
_STOP_S = 10.0  # for native threads to stop, before the process ends without them
FLUSH_S = 2.0  # for the log's last lines
_PRIVATE_MODE = 0o600  # of the door of a daemon that has not taken its predecessor's place
_REHEARSED_TOKENS = 2  # the prompt's last chunk and a round of its own
_START_GRACE_S = 3.0  # between a signal and the end, before READY


class Daemon:
    """One engine and its threads, from the loaded bundle to the last frame.

    The constructor blocks until the engine is warm and the endpoints are bound. Raises UllError if anything is in
    the way; what had been acquired is released. `rehearse`: a request of its own goes all the way before READY; tests
    that count steps leave it out. `predecessor`: what there is of sockets, files and clients comes from that, once this
    daemon is warm; until then its own door is one that nobody knows.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: Config,
        log: Log,
        signals: Signals,
        *,
        rehearse: bool = True,
        predecessor: Predecessor | None = None,
    ) -> None:
        self.config = config
        self._predecessor = predecessor
        self._upgrade: Upgrade | None = None
        self._claims: list[SocketClaim] = []
        self._is_ready = asyncio.Event()
        self._log = log
        self._signals = signals
        self._rehearses = rehearse
        self._listen = config.listen or [default_endpoint()]
        self._past_file: PastOutputsFile | None = None
        self._slow_wake_ups: str | None = None  # why sleeping cores may take long to wake up
        self._exit = ExitStack()  # what close() undoes, last first
        with ExitStack() as exit_stack:
            self._start(bundle, exit_stack)
            self._exit = exit_stack.pop_all()

    async def serve(self) -> int:
        """Serves until SIGTERM or SIGINT has been honoured, or the engine has failed; returns the exit status.

        Raises DaemonError if the daemon cannot answer itself, Stopped if it was asked to stop before it was ready.
        """
        asyncio.get_running_loop().add_reader(self._signals.descriptor, self._hear)
        self._control.start()
        saving = asyncio.create_task(self._past_file.keep_saving()) if self._past_file is not None else None
        try:
            return await self._serve()
        finally:
            if saving is not None:
                saving.cancel()

    async def _serve(self) -> int:
        if self._rehearses:
            await self._rehearse()
        self._signals.heed()
        if self._predecessor is not None:
            try:
                await self._succeed(self._predecessor)
            except Ended as error:
                self._signals.heed()
                raise DaemonError(f"the daemon that was to be succeeded is not there: {error}") from error
        self._describe()
        self._announce()
        self._is_ready.set()
        self._be_patient()
        while not self._signals.asked:
            if self._engine.health() == "failed":
                return await self._fail()
            if self._control.failure is not None:
                return self._lose_control()
            if self._upgrade is not None and self._upgrade.done is not None:
                return 0
            await self._control.changed.wait()
            self._control.changed.clear()
        if self._upgrade is not None:
            await self._upgrade.cancel()
            if self._upgrade.done is not None:
                return 0
        return await self._drain()

    def _be_patient(self) -> None:
        """From now on a signal ends what is served, which takes a while."""
        stopping_s = _CANCEL_S + _STOP_S + FLUSH_S
        self._signals.be_patient(self.config.drain_timeout_s + stopping_s, stopping_s, EXIT_RESTART)

    def close(self) -> None:
        """Stops the native threads and removes the sockets. A thread that hangs costs the process, not the exit."""
        self._signals.end_within(_STOP_S + FLUSH_S, self._status() or EXIT_RESTART)
        self._exit.close()
        self._upgrade = None
        gc.unfreeze()

    async def _rehearse(self) -> None:
        await rehearse(
            self._io.endpoints[0],
            _PRIVATE_MODE if self._predecessor is not None else self.config.ipc_mode,
            self._context,
            self._control,
            min(_REHEARSED_TOKENS, self.config.requests.max_tokens_limit),
            lambda: int(self._engine.stats()["progress"]),
            self._signals.heed,
            None if self._guests is None else self._guests.own,
        )

    def _start(self, bundle: Bundle, exit_stack: ExitStack) -> None:
        """Sockets claimed, memory locked, engine warm, endpoints bound, control plane connected, in this order."""
        config, started_ns = self.config, time.monotonic_ns()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context = context
        self._claim_sockets(exit_stack)
        exit_stack.callback(context.destroy, 0)
        self._vocabulary_digest = vocabulary_digest(bundle)
        self._place_threads(bundle, exit_stack)
        tokenizer = Tokenizer(bundle.tokenizer_directory)
        exit_stack.callback(tokenizer.close)
        tokenizer.start()
        if tokenizer.template_error is not None:
            self._log.warning("chat_template", message=f"chat messages are refused: {tokenizer.template_error}")
        self._signals.heed()
        executor = self._load_engine(bundle, exit_stack)
        self._signals.heed()
        grammars = self._open_grammars(bundle, tokenizer, exit_stack)
        self._signals.heed()
        limits = self._limits(bundle, tokenizer, grammars is not None)
        check_address_space()
        self._guests = Guests(config.access) if config.access.server_key else None
        self._io = self._open_io(context, bundle.digest, limits.max_message_bytes)
        exit_stack.callback(self._io.stop)
        exit_stack.callback(self._engine.stop)  # before io, which delivers the last frames
        socket = context.socket(zmq.PAIR)
        exit_stack.callback(socket.close, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 1)  # requests wait with their clients, where each has its turn
        socket.connect(CONTROL_ENDPOINT)  # before the first request can arrive
        mode = config.ipc_mode if self._predecessor is None else _PRIVATE_MODE
        mask = os.umask(0o777 & ~mode)
        try:
            self._io.start()
        finally:
            os.umask(mask)
        for path in (path for claim in self._claims for path in claim.paths):
            path.chmod(mode)
        if self._predecessor is None:
            self._prioritise_io()
        if self._placement.configured:
            self._slow_wake_ups = exit_stack.enter_context(quick_wake_ups())
        start_ns = time.monotonic_ns() - started_ns
        self._exclusive = self._open_exclusive(bundle, executor, exit_stack)
        self._control = ControlPlane(
            socket,
            self._engine,
            self._io,
            Admission(tokenizer, limits, bundle.manifest.tokens.eos, self._engine.vocabulary.text),
            self._log,
            engine_summary=_summary(bundle, config.verify),
            executor_summary={**executor, "start_ns": start_ns},
            queue_depth=config.engine.queue_depth,
            sessions=config.sessions,
            grammars=grammars,
            journal=self._exclusive.journal,
            access=config.access,
            upgrade=self._begin_upgrade,
        )
        exit_stack.callback(self._control.close)
        if self._predecessor is None:
            self._exclusive.open_metrics(self._io.endpoints[0])
        exit_stack.callback(self._exclusive.close_metrics)
        self._served = Ready(
            version=__version__,
            saved_format=_native.SAVED_FORMAT,
            listen=self._listen,
            server_key="" if self._guests is None else self._guests.own.server,
            vocabulary=self._vocabulary_digest,
        )
        self._summary = {"name": bundle.manifest.name, "context": limits.context, "executor": executor["name"]}
        self._start_ms = start_ns // 1_000_000
        self._identity = {
            "bundle": bundle.digest,
            "source_sha256": bundle.manifest.provenance.source_sha256,
            "verified": config.verify,
        }
        gc.collect()
        gc.freeze()  # what is alive now stays alive: later collections need not look at it

    def _describe(self) -> None:
        """What READY says."""
        self._ready = {
            "name": self._summary["name"],
            "listen": ",".join(self._io.endpoints),
            "pid": os.getpid(),
            "context": self._summary["context"],
            "executor": self._summary["executor"],
            **({"avoid_cores": core_list(avoid)} if (avoid := self._placement.avoid) else {}),
            **({} if self._exclusive.metrics_url is None else {"metrics": self._exclusive.metrics_url}),
            "start_ms": self._start_ms,
        }

    # ---- a successor, or a predecessor ---------------------------------------------------------------------------

    def _begin_upgrade(self, identity: bytes, request_id: int) -> None:
        """A client asks for a successor. Raises RequestError where there cannot be one now."""
        if self._signals.asked:
            raise Draining()
        if self._upgrade is not None and self._upgrade.under_way:
            which = f"process {self._upgrade.successor}" if self._upgrade.successor else "it has no number yet"
            raise RequestError("upgrade_failed", f"a successor is being started already ({which})")
        if os.getpid() == 1:
            reason = "the daemon is process 1 of its container, which ends with it: start another container"
            raise RequestError("upgrade_failed", reason)
        holdings = Holdings(
            io=self._io,
            control=self._control,
            claims=self._claims,
            served=self._served,
            cores=self._allowed,
            drain_timeout_s=self.config.drain_timeout_s,
            ready=self._is_ready,
            metrics=lambda: self._exclusive.metrics_address,
            prepare=self._prepare_successor,
            leave=self._leave,
            resume=self._resume,
        )
        self._upgrade = Upgrade(holdings, self._log, identity, request_id)

    def _prepare_successor(self) -> None:
        """What it reads at its start is written, and the cores are free for it to choose."""
        if self._past_file is not None:
            self._past_file.save()
        self._core_claims.release()

    def _leave(self) -> None:
        self._control.use_journal(None)
        self._exclusive.close()

    def _resume(self, left: bool) -> None:
        """There is no successor."""
        for core in self._placement.computing:
            self._core_claims.claim(core)
        if not left:
            return
        self._exclusive.open_journal()
        self._control.use_journal(self._exclusive.journal)
        self._exclusive.try_metrics(self._io.endpoints[0])

    async def _succeed(self, predecessor: Predecessor) -> None:
        """Takes the predecessor's place. Raises DaemonError; the predecessor then goes on, and nothing was touched."""
        io, control, exclusive = self._io, self._control, self._exclusive
        inheritance = await inherit(
            predecessor, io, self._served, exclusive.open_journal, lambda: self._signals.asked > 0
        )
        estate = inheritance.estate
        self._predecessor = None
        self._be_patient()
        _native.be_the_service(True)
        self._release_claims()
        self._claims = inheritance.claims(self.config.ipc_mode)
        if self._guests is not None:
            self._reload()  # SIGHUP went to the predecessor
        control.use_journal(exclusive.journal)
        control.take_over(inheritance.identities, estate.clients, estate.messages)
        if estate.asker is not None:
            control.reply(inheritance.identities[estate.asker], inheritance.answer())
        io.start()
        await asyncio.to_thread(exclusive.try_metrics, io.endpoints[0], estate.metrics)
        await asyncio.to_thread(predecessor.wait)
        self._take_cores()

    def _take_cores(self) -> None:
        """The threads go where they belong, once the predecessor's are gone."""
        placement = self._placement
        computing = placement.computing
        team = computing[1:] if len(computing) == self._threads else ()
        pin({"ull-engine": computing[:1], "ull-team": team, "ull-io": [placement.io] if placement.io >= 0 else ()})
        self._prioritise_engine()
        self._prioritise_io()

    def _prioritise_engine(self) -> None:
        if self.config.engine.priority:
            others = 0 if self._on_gpu else self._threads - 1
            prioritise({"ull-engine": 1, "ull-team": others}, self.config.engine.priority, "engine.priority")

    def _prioritise_io(self) -> None:
        if self.config.io.priority:
            prioritise({"ull-io": 1}, self.config.io.priority, "io.priority")

    # ---- the start -----------------------------------------------------------------------------------------------

    def _open_exclusive(self, bundle: Bundle, executor: dict[str, Any], exit_stack: ExitStack) -> Exclusive:
        header = Header(
            time="",
            daemon=__version__,
            bundle=bundle.digest,
            source=bundle.manifest.provenance.source_sha256,
            executor=executor["name"],
            machine=this_machine(),
        )
        device = self.config.engine.device if self._on_gpu else None
        exclusive = Exclusive(
            self.config, header, device, None if self._guests is None else self._guests.own, self._log
        )
        exit_stack.callback(exclusive.close)
        if self._predecessor is None:
            exclusive.open_journal()
        return exclusive

    def _open_past_outputs(self, bundle: Bundle, exit_stack: ExitStack) -> _native.PastOutputs | None:
        """What the suffix drafter remembers, read from its file if there is one, which is written after the end."""
        if not self.config.past_outputs:
            return None
        past = _native.PastOutputs(self.config.past_outputs)
        if path := self.config.speculation.past_outputs_file:
            vocabulary = bundle.manifest.model.vocabulary
            self._past_file = PastOutputsFile(Path(path), past, self._vocabulary_digest, vocabulary, self._log)
            self._past_file.load()
            exit_stack.callback(self._past_file.save)
        return past

    def _open_grammars(self, bundle: Bundle, tokenizer: Tokenizer, exit_stack: ExitStack) -> Grammars | None:
        """What compiles the grammars of requests; None where there can be none, of which the log has the reason."""
        if not self._engine.info["constraints"]:
            return None
        try:
            library = library_path()
        except DaemonError as error:
            self._log.warning("grammars", message=f"grammars are refused: {error}")
            return None
        vocabulary, eos = str(bundle.vocabulary_path), list(bundle.manifest.tokens.eos)
        if not eos:
            self._log.warning("grammars", message="grammars are refused: no token of this model ends a text")
            return None
        special = tokenizer.special_tokens
        compiler = _native.Grammars(library, vocabulary, eos, special)
        setup = {"library": library, "vocab_path": vocabulary, "eos": eos, "special": special}
        grammars = Grammars(compiler, setup, self.config.grammars)
        exit_stack.callback(grammars.close)
        grammars.start()
        return grammars

    def _limits(self, bundle: Bundle, tokenizer: Tokenizer, grammars: bool) -> Limits:
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
        context = int(engine["context"])
        return Limits(
            context=context,
            vocabulary=bundle.manifest.model.vocabulary,
            max_message_bytes=config.io.max_message_bytes or longest_request(context, tokenizer.bytes_per_token),
            default_max_tokens=config.requests.default_max_tokens,
            max_tokens=config.requests.max_tokens_limit,
            drafters=drafters,
            default_drafter=drafter,
            default_max_tree=config.speculation.max_tree or int(engine["default_max_tree"]),
            penalties=bool(engine["penalties"]),
            choices=engine["score_nodes"] > 0,
            prompt_logprobs=bool(engine["scores_prompts"]),
            grammars=grammars,
            max_grammar_bytes=config.grammars.source_bytes,
            max_sessions=min(config.sessions.per_client, config.sessions.total),
            max_pinned_sessions=config.engine.sessions // 2,
            # Beside what is pinned, a request of the full context must find its pages.
            max_pinned_tokens=max(0, int(self._engine.stats()["page_count"]) - -(-context // PAGE_TOKENS))
            * PAGE_TOKENS,
        )

    def _claim_sockets(self, exit_stack: ExitStack) -> None:
        exit_stack.callback(self._release_claims)
        if self._predecessor is not None:
            directory = exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="ull-"))
            self._claims.append(SocketClaim(Path(directory) / "warm.sock", _PRIVATE_MODE))
            return
        for endpoint in self._listen:
            if (path := ipc_path(endpoint)) is not None:
                self._claims.append(SocketClaim(path, self.config.ipc_mode))

    def _release_claims(self) -> None:
        for claim in self._claims:
            claim.release()

    def _place_threads(self, bundle: Bundle, exit_stack: ExitStack) -> None:
        """Decides where everything runs, takes this thread there with all that it starts, keeps memory out of swap."""
        config, engine = self.config, self.config.engine
        self._threads = 1 if runs_on_gpu(bundle) else engine.threads or len(engine.cores) or auto_threads()
        claims, allowed = CoreClaims(), os.sched_getaffinity(0)
        self._core_claims, self._allowed = claims, sorted(allowed)
        exit_stack.callback(claims.release)
        self._placement = placement = place(
            engine,
            config.io,
            automatic=config.placement == "auto",
            threads=self._threads,
            allowed=allowed,
            claims=claims,
        )
        placement.check_priorities(engine, config.io)
        exit_stack.callback(move_threads, allowed)
        move_threads(placement.others)
        return_large_blocks()
        self._lock_memory()

    def _load_engine(self, bundle: Bundle, exit_stack: ExitStack) -> dict[str, Any]:
        """Loads the weights and warms the engine up; returns what `info` says about the executor."""
        config, placement = self.config.engine, self._placement
        # Where a predecessor computes, a successor stays off its cores until it has gone.
        core = placement.engine if self._predecessor is None else -1
        team = placement.computing if core >= 0 and len(placement.computing) == self._threads else ()
        self._executor = executor = open_executor(
            bundle, self.config, self._threads, team, self._log, exit_stack, self._open_past_outputs(bundle, exit_stack)
        )
        self._engine = _native.Engine(
            executor,
            str(bundle.vocabulary_path),
            queue_depth=config.queue_depth,
            client_share=config.client_share,
            core=core,
            cooperative=placement.cooperative,
            idle=config.idle,
            watchdog_ms=config.watchdog_ms,
            max_sessions=config.sessions,
            prefix_cache=config.prefix_cache,
            aging_ms=config.aging_ms,
            slow_cycle_us=config.slow_cycle_us,
        )
        exit_stack.callback(self._engine.stop)
        self._engine.warm_up()
        self._engine.start()
        self._on_gpu = runs_on_gpu(bundle)
        if self._predecessor is None:
            self._prioritise_engine()
        return {
            "name": executor.name,
            "version": __version__,
            "pid": os.getpid(),
            "device": config.device if runs_on_gpu(bundle) else None,
            "threads": 1 if runs_on_gpu(bundle) else self._threads,
            "weight_bytes": executor.weight_bytes,
            "kv_bytes": executor.kv_bytes,
            "placement": placement.summary(),
            "adaptive": self.config.speculation.adaptive,
            **{name: self._engine.info[name] for name in _EXECUTOR_FIGURES},
        }

    def _open_io(self, context: zmq.Context[zmq.Socket[bytes]], digest: str, longest_message: int) -> _native.Io:
        config = self.config.io
        listen = self._listen if self._predecessor is None else [f"ipc://{claim.path}" for claim in self._claims]
        return _native.Io(
            self._engine,
            zmq_context=context.underlying,
            libzmq=loaded_libzmq(),
            listen=[endpoint.replace("tcp://localhost:", "tcp://127.0.0.1:") for endpoint in listen],
            control=CONTROL_ENDPOINT,
            core=config.core if self._predecessor is None else -1,
            cooperative=self._placement.io_shares,
            idle=config.idle,
            client_stall_ms=config.client_stall_ms,
            max_message=longest_message,
            local=[str(claim.local) for claim in self._claims if claim.local is not None],
            bundle=digest,
            **({} if self._guests is None else self._guests.options()),
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
        placement = self._placement
        log = self._log.warning if placement.configured and placement.reason else self._log.info
        cores = {name: core_list(cores) or "any" for name, cores in placement.cores().items()}
        log("cores", **cores, cooperative=placement.cooperative, message=placement.reason or None)
        if self._slow_wake_ups is not None:
            self._log.info("idle", message=f"sleeping cores may take long to wake up: {self._slow_wake_ups}")
        self._log.info("ready", version=__version__, **self._ready, **self._identity)
        line = " ".join(f"{name}={value}" for name, value in self._ready.items())
        if (problem := announce(f"READY {line}")) is not None:
            self._log.warning("ready", message=f"READY could not be printed: {problem}")
        _native.notify(f"READY=1\nMAINPID={os.getpid()}\nSTATUS=serving {line}")

    def _hear(self) -> None:
        self._signals.hear(self._reload)
        if self._signals.asked:
            self._control.changed.set()

    def _reload(self) -> None:
        """SIGHUP: reads the list of clients again. The configuration stays: memory and threads are laid out by it."""
        if self._guests is None:
            message = "SIGHUP has nothing to read again: for the configuration, ask for `ull upgrade`, or restart"
            self._log.warning("reload", message=message)
            return
        try:
            count = self._guests.read()
        except ConfigError as error:
            self._log.error("reload", message=f"the clients stay as they were: {error.message}")
        else:
            self._log.info("reload", clients=count, message="access.clients was read again")

    async def _drain(self) -> int:
        """Refuses what is new, lets what was accepted finish, then cancels; a second signal skips the waiting."""
        _native.notify("STOPPING=1\nSTATUS=draining")
        control, timeout_s = self._control, self.config.drain_timeout_s
        await asyncio.sleep(_LAST_CALL_S)
        control.draining = True
        self._log.info("draining", live=control.live, timeout_s=timeout_s)
        loop = asyncio.get_running_loop()
        await self._until_idle(loop.time() + timeout_s, hurry=True)
        cancelled = control.live
        if cancelled and self._signals.asked > 1:
            self._log.warning("draining", message="second signal: cancelling what still runs")
        if cancelled:
            control.cancel_all()
            await self._until_idle(loop.time() + _CANCEL_S, hurry=False)
        self._log.info("stopped", cancelled=cancelled, unfinished=control.live, **self._totals())
        return self._status()

    async def _until_idle(self, deadline: float, hurry: bool) -> None:
        """Waits for the last accepted request to end, until `deadline`, or a second signal if `hurry`."""
        changed = self._control.changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while self._control.live and not (hurry and self._signals.asked > 1):
                    await changed.wait()
                    changed.clear()

    async def _fail(self) -> int:
        """The engine cannot go on: its requests have been ended by the core; give their last frames time to leave."""
        reason = self._executor.failure or "the executor cannot say why"
        remedy = "restart it" if self._executor.restart_helps else "look at the machine before it is started again"
        self._log.error("engine", message=f"the engine has failed; stopping: {remedy}", reason=reason, **self._totals())
        _native.notify(f"STOPPING=1\nSTATUS=engine failed: {reason}")
        self._control.draining = True
        await self._until_idle(asyncio.get_running_loop().time() + _CANCEL_S, hurry=False)
        return self._status()

    def _lose_control(self) -> int:
        """The control plane takes no more messages: whoever waits for an answer is better served by a new process."""
        self._log.error("control", message="no more messages can be taken; stopping", reason=self._control.failure)
        _native.notify(f"STOPPING=1\nSTATUS=control plane failed: {self._control.failure}")
        return EXIT_RESTART

    def _status(self) -> int:
        """The exit status of a daemon whose engine is as it is now."""
        if self._engine.health() != "failed":
            return 0
        return EXIT_RESTART if self._executor.restart_helps else EXIT_ENGINE_FAILED

    def _totals(self) -> dict[str, Any]:
        metrics = self._control.metrics
        return {"accepted": metrics.accepted, "refused": sum(metrics.refused.values())}


def run(
    bundle: Path,
    config: Config,
    log: Log,
    signals: Signals,
    *,
    rehearse: bool = True,
    predecessor: Predecessor | None = None,
) -> int:
    """Starts a daemon and serves to its end; returns the exit status. `rehearse` and `predecessor` are `Daemon`'s.

    Raises UllError if it cannot start, Stopped if it was asked to stop before it was ready.
    """
    signals.be_patient(_START_GRACE_S, 0.0, 0)
    try:
        daemon = Daemon(
            open_bundle(bundle, config.verify), config, log, signals, rehearse=rehearse, predecessor=predecessor
        )
    except (ValueError, RuntimeError, MemoryError, OSError) as error:  # of the native core: what it says is the reason
        raise DaemonError(f"cannot start: {_reason(error)}") from error
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(daemon.serve())
    finally:
        daemon.close()


def _reason(error: Exception) -> str:
    """What has gone wrong, by the configuration's keys: the core names those of [engine] without the table."""
    if isinstance(error, PermissionError) and error.filename is not None:
        return denial(Path(os.fsdecode(error.filename)), "use")
    if isinstance(error, MemoryError):
        return "out of memory"
    said = str(error)
    return f"engine.{said}" if said.partition(":")[0] in EngineConfig.__struct_fields__ else said


def _summary(bundle: Bundle, verified: str) -> dict[str, Any]:
    """What `info` says about the engine. `verified`: what of the bundle was compared at start, "sizes" or "hashes"."""
    manifest = bundle.manifest
    model, forward = manifest.model, manifest.forward
    quality: Calibration | FastPrefill | Quality | None = manifest.quality
    if forward.uses("tensorrt") and manifest.calibration is not None:
        quality = manifest.calibration
    elif manifest.quality is not None and manifest.quality.fast_prefill is not None:
        quality = manifest.quality.fast_prefill
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
        "digest": bundle.digest,
        "verified": verified,
        "source_sha256": manifest.provenance.source_sha256,
        "drafter_sha256": {name: source.sha256 for name, source in manifest.provenance.drafters.items()},
    }
