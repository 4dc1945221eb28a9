"""The native core of ull: what ull/native/module/ binds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

Isa = Literal["auto", "avx512", "avx2", "portable"]
Idle = Literal["adaptive", "spin"]
Drafter = Literal["none", "suffix", "medusa", "eagle", "dflash", "draft", "auto"]

IO_MESSAGES: Final[Mapping[str, bytes]]  # what the io thread tells the control plane: the letter by the name
LIMITS: Final[Mapping[str, int]]  # of requests, and of the configuration (module/limits.cpp)
SAVED_FORMAT: Final[int]  # of what one daemon hands to the next
WIRE_VERSION: Final[bytes]

class InvalidRequest(ValueError):
    """A submission that cannot be served, whatever the engine's state."""

    field: str

class QueueFull(RuntimeError):
    """Every place in the queue, or of the client's share of it, is taken."""

    queue_length: int  # requests that wait
    expected_ns: int  # nanoseconds until there is a place; an estimate

class DeadlineUnreachable(RuntimeError):
    """The request would not be done by its deadline; `expected_ns` (CLOCK_MONOTONIC) says when it would."""

    expected_ns: int

class EngineClosed(RuntimeError): ...

class GrammarError(ValueError):
    """A grammar that cannot be used: why, and where in its text."""

class Executor:
    """What runs the maths of an engine. The properties are known once an Engine has prepared it."""

    @property
    def name(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def restart_helps(self) -> bool: ...
    def settle(self) -> None: ...

class PastOutputs:
    def __init__(self, tokens: int) -> None: ...
    def append(self, tokens: NDArray[np.int32]) -> None: ...
    def copy(self) -> NDArray[np.int32]: ...
    @property
    def appended(self) -> int: ...

class CpuExecutor(Executor):
    def __init__(
        self,
        spec: dict[str, Any],
        *,
        threads: int,
        cores: Sequence[int],
        prefill_chunk: int = 256,
        pages: int | None = None,
        isa: Isa = "auto",
        speculate: Drafter = "none",
        max_tree: int = 64,
        adaptive: bool = True,
        coupled: bool = True,
        past_outputs: PastOutputs | None = None,
        ngram: bool = False,
        replayed_acceptance: dict[str, list[list[float]]] = {},
    ) -> None: ...

class SpeculationRig:
    def __init__(
        self,
        spec: dict[str, Any],
        *,
        threads: int = 1,
        cores: Sequence[int] = [],
        prefill_chunk: int = 256,
        pages: int | None = None,
        isa: Isa = "auto",
        adaptive: bool = True,
        coupled: bool = True,
        drafter: str = "",
        truth: Sequence[int] = [],
        seed: int = 0,
        past_outputs: PastOutputs | None = None,
    ) -> None: ...
    def decode(
        self,
        tokens: NDArray[np.int32],
        max_tokens: int,
        sampling: dict[str, Any] = {},
        speculate: Drafter = "none",
        max_tree: int = 0,
        pages: NDArray[np.int32] | None = None,
        cached: int = 0,
    ) -> dict[str, Any]: ...
    @property
    def info(self) -> dict[str, Any]: ...

class GraphExecutor(Executor):
    def __init__(
        self,
        program: dict[str, Any],
        *,
        watchdog_ms: int = 2000,
        prefill_chunk: int = 512,
        drafter: Drafter = "none",
        max_tree: int = 64,
        adaptive: bool = True,
        past_outputs: PastOutputs | None = None,
        replayed_acceptance: dict[str, list[list[float]]] = {},
    ) -> None: ...

class ScriptedExecutor(Executor):
    def __init__(
        self,
        tokens: Sequence[int],
        *,
        from_past: bool = False,
        tokens_per_round: int = 1,
        vocabulary: int = 32_000,
        context: int = 4096,
        pages: int = 128,
        prefill_chunk: int = 256,
        round_ns: int = 0,
        prefill_token_ns: int = 0,
        blocking: bool = False,
        layers: int = 0,
        fail_step: int = -1,
        hang_step: int = -1,
        ignore_abort: bool = False,
        failure: str = "",
        restart_helps: bool = False,
        forced_tokens: int = 0,
        score_nodes: int = 64,
    ) -> None: ...
    @property
    def steps(self) -> int: ...

class CpuModel:
    def __init__(
        self,
        spec: dict[str, Any],
        *,
        threads: int = 1,
        cores: Sequence[int] = [],
        isa: Isa = "auto",
        pages: int | None = None,
        max_chunk: int = 256,
        input_scales: dict[str, float] | None = None,
    ) -> None: ...
    def logits(
        self, tokens: NDArray[np.int32], chunk: int = 256, pages: NDArray[np.int32] | None = None
    ) -> NDArray[np.float32]: ...
    def prefill(self, tokens: NDArray[np.int32], chunk: int = 256) -> None: ...
    def decode(self, token: int, position: int) -> NDArray[np.float32]: ...
    def generate_greedy(self, tokens: NDArray[np.int32], n: int) -> NDArray[np.int32]: ...
    @property
    def isa(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...

class Termination:
    def __init__(self) -> None: ...
    @property
    def asked(self) -> int: ...
    @property
    def hangups(self) -> int: ...
    @property
    def last_signal(self) -> int: ...
    @property
    def fd(self) -> int: ...
    def clear(self) -> None: ...
    def set_patience(self, first_ms: int, second_ms: int, status: int) -> None: ...
    def end_within(self, time_ms: int, status: int) -> None: ...

class GrammarMatcher:
    def take(self, token: int) -> bool: ...
    def give_back(self, count: int) -> None: ...
    def mask(self, vocabulary: int) -> NDArray[np.uint32] | None: ...
    def forced(self, most: int) -> list[int]: ...
    @property
    def complete(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...

class CompiledGrammar:
    @property
    def key(self) -> str: ...
    def matcher(self) -> GrammarMatcher: ...

class Grammars:
    def __init__(self, library: str, vocab_path: str, eos: Sequence[int], special: Mapping[int, str] = {}) -> None: ...
    def compile(self, kind: Literal["json_schema", "regex", "lark", "json_object"], source: str) -> CompiledGrammar: ...

class Engine:
    def __init__(
        self,
        executor: Executor,
        vocab_path: str,
        *,
        queue_depth: int = 64,
        client_share: int = 0,
        core: int = -1,
        cooperative: bool | None = None,
        idle: Idle = "adaptive",
        watchdog_ms: int = 2000,
        max_prompt: int = 0,
        max_sessions: int = 16,
        prefix_cache: bool = True,
        aging_ms: int = 2000,
        slow_cycle_us: int = 10_000,
    ) -> None: ...
    def warm_up(self) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def submit(
        self, identity: bytes, request_id: int, tokens: bytes | NDArray[np.int32], params: dict[str, Any]
    ) -> int: ...
    def cancel(self, identity: bytes, request_id: int, shed: bool = ...) -> bool: ...
    def unpin(self, pin: int) -> None: ...
    def withdraw(self, identity: bytes, request_id: int) -> bool: ...
    def commit(self, identity: bytes, request_id: int) -> bool: ...
    def drain(self) -> None: ...
    def drained(self) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    def trace(self, frames: bool, since: int, most: int) -> tuple[bytes, int]: ...
    def round_histogram(self) -> dict[str, Any]: ...
    def health(self) -> Literal["ok", "stalled", "failed"]: ...
    def beat(self) -> None: ...
    def end_beat(self) -> None: ...
    def threads(self) -> dict[str, dict[str, int]]: ...
    @property
    def control_call(self) -> int: ...
    @property
    def queue_length(self) -> int: ...
    @property
    def client_share(self) -> int: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def info(self) -> dict[str, Any]: ...

class AllowList:
    def __init__(self) -> None: ...
    def set(self, clients: Sequence[tuple[bytes, str, bool]]) -> None: ...

class Io:
    def __init__(
        self,
        engine: Engine,
        *,
        zmq_context: int,
        libzmq: str,
        listen: Sequence[str],
        control: str = "inproc://ull-control",
        core: int = -1,
        cooperative: bool | None = None,
        idle: Idle = "adaptive",
        client_stall_ms: int = 250,
        max_message: int = 16 * 1024 * 1024,
        linger_ms: int = 1000,
        ping_ms: int = 2000,
        mute_ms: int = 5000,
        local: Sequence[str] = [],
        bundle: str = "",
        libsodium: str = "",
        curve_secret: bytes = b"",
        curve_clients: AllowList | None = None,
    ) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def halt(self) -> None: ...
    def hand_over(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes, list[bytes], bytes]]]: ...
    def take_over(
        self, doors: Sequence[tuple[int, bytes]], clients: Sequence[tuple[int, bytes, Sequence[bytes]]]
    ) -> list[bytes]: ...
    def abandon(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def delivery_histogram(self) -> dict[str, Any]: ...
    @property
    def endpoints(self) -> list[str]: ...

class MessageSocket:
    def __init__(self, socket: int, *, libzmq: str) -> None: ...
    def receive(self, messages: list[list[bytes]], wait: bool) -> int: ...
    def send(self, frames: Sequence[bytes]) -> int: ...

class MonitoredSocket:
    def __init__(self, socket: Any, *, libzmq: str) -> None: ...
    def end(self) -> None: ...

class Vocabulary:
    def __init__(self, path: str) -> None: ...
    @property
    def size(self) -> int: ...
    def text(self, ids: Sequence[int], prompt: Sequence[int] = []) -> str: ...

class Detokenizer:
    def __init__(self, vocab_path: str, stop: Sequence[str] = [], prompt: Sequence[int] = []) -> None: ...
    def feed(self, tokens: Sequence[int]) -> str: ...
    def finish(self) -> str: ...
    @property
    def stopped(self) -> bool: ...

def evaluate(
    spec: dict[str, Any],
    tokens: NDArray[np.int32],
    window: int,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
    input_scales: dict[str, float] | None = None,
    token_scales: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]: ...
def observe(
    spec: dict[str, Any],
    tokens: NDArray[np.int32],
    window: int,
    threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, NDArray[np.uint64]], dict[str, float], dict[str, NDArray[np.float32]]]: ...
def sample(
    logits: NDArray[np.float32],
    position: int,
    sampling: dict[str, Any],
    history: NDArray[np.int32] | None = None,
    prompt_tokens: int = 0,
) -> int: ...
def gumbel(seed: int, position: int, tokens: NDArray[np.int32]) -> NDArray[np.float32]: ...
def notify(state: str) -> bool: ...
def be_the_service(is_it: bool) -> None: ...
def measure_noise(core: int, duration_ns: int, bounds_ns: Sequence[int]) -> dict[str, Any]: ...
