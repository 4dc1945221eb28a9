"""The executor that a bundle's target asks for, loaded; an engine prepares it and warms it up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ull import _native
from ull.bundle import Bundle
from ull.daemon.config import PAGE_TOKENS, Config, EngineConfig
from ull.errors import ConfigError
from ull.log import Log
from ull.wire import MAX_TREE

CPU_PREFILL_CHUNK = 256  # tokens, unless the configuration says how many


def open_executor(
    bundle: Bundle,
    config: Config,
    threads: int,
    cores: Sequence[int],
    log: Log,
    exit_stack: ExitStack,
    past_outputs: _native.PastOutputs | None = None,
) -> _native.Executor:
    """Loads the weights of `bundle`. `cores`: one per computing thread, or none. `past_outputs`: for its drafter.

    What `exit_stack` gives back, it gives back after the engine has stopped.

    Raises ConfigError, and for a GPU's bundle GpuError, or whatever the native core complains of.
    """
    spec = bundle.native_spec(context=config.engine.context or None)  # also checks the context
    _check_pages(config.engine, int(spec["context"]), log)
    if runs_on_gpu(bundle):
        return _graph_executor(bundle, config, int(spec["context"]), log, exit_stack, past_outputs)
    return _cpu_executor(bundle, config, threads, cores, spec, past_outputs)


def runs_on_gpu(bundle: Bundle) -> bool:
    """Whether the bundle's target is a GPU's architecture."""
    return bundle.manifest.target.startswith("sm_")


def _check_pages(engine: EngineConfig, context: int, log: Log) -> None:
    """Complains of fewer pages than `context` tokens need. Raises ConfigError where the context is configured too."""
    held = engine.kv_pages * PAGE_TOKENS
    if not engine.kv_pages or held >= context:
        return
    pages = f"{engine.kv_pages} pages hold {held} tokens" if engine.kv_pages > 1 else f"one page holds {held} tokens"
    needed = -(-context // PAGE_TOKENS)
    if engine.context:
        raise ConfigError(
            f"engine.kv_pages: {pages}, but engine.context is {context}: set engine.kv_pages to {needed} or more, or a "
            "smaller context",
            "engine.kv_pages",
        )
    log.warning(
        "engine",
        message=f"engine.kv_pages: {pages}, of the bundle's context of {context}: a request may have no more; "
        f"{needed} pages hold all of it",
    )


def _cpu_executor(
    bundle: Bundle,
    config: Config,
    threads: int,
    cores: Sequence[int],
    spec: dict[str, Any],
    past_outputs: _native.PastOutputs | None,
) -> _native.Executor:
    engine, speculation = config.engine, bundle.manifest.speculation
    return _native.CpuExecutor(
        spec,
        threads=threads,
        cores=list(cores),
        prefill_chunk=engine.prefill_chunk or CPU_PREFILL_CHUNK,
        pages=engine.kv_pages or None,
        isa=engine.isa,
        speculate="none" if speculation is None else speculation.default,
        max_tree=MAX_TREE if speculation is None else speculation.max_tree,
        adaptive=config.speculation.adaptive,
        past_outputs=past_outputs,
    )


def _graph_executor(
    bundle: Bundle,
    config: Config,
    context: int,
    log: Log,
    exit_stack: ExitStack,
    past_outputs: _native.PastOutputs | None,
) -> _native.Executor:
    """Weights, kernels and captured graphs on the device, and what replays them."""
    engine, speculation = config.engine, bundle.manifest.speculation
    from ull.gpu.params import CHUNK_TOKENS
    from ull.gpu.program import Program  # cuda-python is installed only where there is a GPU

    program = Program(
        bundle, log, context=context, pages=engine.kv_pages or None, device=engine.device, persistent=engine.persistent
    )
    closing = exit_stack.enter_context(ExitStack())
    closing.callback(program.close)
    drafter = "none" if speculation is None else speculation.default
    if drafter != "none" and bundle.manifest.forward.tree_sizes == [1]:
        reason = "this bundle's plans verify no trees bit for bit"
        log.warning("engine", message=f"the drafter {drafter} is not used: {reason}; requests get none instead")
        drafter = "none"
    executor = _native.GraphExecutor(
        program.handover,
        watchdog_ms=engine.watchdog_ms,
        prefill_chunk=engine.prefill_chunk or CHUNK_TOKENS,
        drafter=drafter,
        max_tree=MAX_TREE if speculation is None else speculation.max_tree,
        adaptive=config.speculation.adaptive,
        past_outputs=past_outputs,
    )

    def settle() -> None:
        executor.settle()
        if executor.failure is not None:
            program.abandon()  # a device that has failed gives nothing back; the end of the process does
            closing.pop_all()

    closing.callback(settle)
    return executor
