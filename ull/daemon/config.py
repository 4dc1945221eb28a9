"""The daemon's configuration: every key with its unit, default and meaning, in this one place.

A TOML file sets any subset of the keys. `ull config --defaults` prints `default_toml()`, which is generated from the
structs below; parsing it gives exactly the defaults.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ull.access import denial
from ull.cores import MAX_CORE
from ull.endpoints import check_endpoint, local_endpoint, parse_address, same_endpoint
from ull.errors import ConfigError
from ull.wire import MAX_TREE
from ull.words import words_of

# The core's own numbers, held equal by tests/core/test_shared_numbers.py: a configuration is read without the core.
PAGE_TOKENS = 64  # of a page of the KV cache
MAX_CONTEXT = 2**24  # tokens
MAX_QUEUE_DEPTH = 65536
MAX_PAST_OUTPUTS = 2**24  # tokens
MAX_SESSIONS = 1024
MAX_OPEN = 65536  # sessions of clients
MAX_GRAMMAR_BYTES = 2**18  # of a grammar's text
_LEAST_MESSAGE = 1024  # bytes
_PAST_OUTPUTS = 65536  # tokens, where nothing is said
_LINE = 110  # columns of a comment in the printed defaults

Idle = Literal["adaptive", "spin"]


def _key(meaning: str, unit: str | None = None, ge: float | None = None, le: float | None = None) -> Meta:
    """The description of one key, as it is printed above it, and the range that is enforced."""
    return Meta(description=meaning, ge=ge, le=le, extra={"unit": unit} if unit else None)


class EngineConfig(msgspec.Struct, kw_only=True, frozen=True):
    """The engine thread and the executor."""

    core: Annotated[
        int,
        _key(
            "core that the engine thread is pinned to; -1: the first of engine.cores, or by `placement`",
            ge=-1,
            le=MAX_CORE,
        ),
    ] = -1
    threads: Annotated[
        int, _key("threads that compute, the engine thread included; 0: one per free core, at most 8", ge=0, le=256)
    ] = 0
    cores: Annotated[
        list[int],
        _key("cores that the computing threads are pinned to, the engine thread's first; []: by `placement`"),
    ] = []
    idle: Annotated[
        Idle, _key("what the engine thread does without work: adaptive backs off to short sleeps, spin never does")
    ] = "adaptive"
    priority: Annotated[
        int,
        _key(
            "real-time priority (SCHED_RR) of the computing threads, which then need cores of their own; 0: none. It "
            "takes the right to one: RLIMIT_RTPRIO, systemd/priority.conf",
            ge=0,
            le=99,
        ),
    ] = 0
    device: Annotated[int, _key("number of the GPU that a bundle for one runs on", ge=0, le=63)] = 0
    persistent: Annotated[
        bool,
        _key(
            "one kernel for all layers of a plain round on a GPU instead of a chain; the tokens are the same, measure "
            "which is faster on your GPU"
        ),
    ] = False
    isa: Annotated[
        Literal["auto", "avx512", "avx2", "portable"],
        _key("instruction set of the cpu executor; every choice gives the same bits"),
    ] = "auto"
    context: Annotated[
        int,
        _key(
            "prompt and completion of one request together; 0: what the bundle offers", "tokens", ge=0, le=MAX_CONTEXT
        ),
    ] = 0
    prefill_chunk: Annotated[
        int,
        _key(
            "most prompt tokens put into the KV cache in one step, which a cancel or a more urgent request waits for; "
            "0: 512 on a GPU, the most that it takes there (best whole 128s), and 256 on the cpu, where a layer's "
            "activations of as many stay allocated: about 50 bytes per token and unit of the hidden size",
            "tokens",
            ge=0,
            le=65536,
        ),
    ] = 0
    kv_pages: Annotated[
        int,
        _key(
            f"KV cache, in pages of {PAGE_TOKENS} tokens, allocated at start; 0: enough for one full context. Fewer "
            "cut it short",
            "pages",
            ge=0,
            le=100_000_000,
        ),
    ] = 0
    queue_depth: Annotated[
        int,
        _key(
            "accepted requests that may wait; the next one is answered busy. Each place takes 22 KiB, and 4 bytes "
            "per token of the context",
            "requests",
            ge=1,
            le=MAX_QUEUE_DEPTH,
        ),
    ] = 64
    client_share: Annotated[
        int,
        _key(
            "requests that one client may have waiting or running, more are answered busy; 0: half of `queue_depth`, "
            "at least one. Clients take turns: one that waits with many lets others in after each",
            "requests",
            ge=0,
            le=MAX_QUEUE_DEPTH + 1,
        ),
    ] = 0
    sessions: Annotated[
        int,
        _key(
            "conversations whose KV cache stays for their next turn, as far as pages reach. Each takes 4 bytes per "
            "token of the context beside its pages",
            ge=1,
            le=MAX_SESSIONS,
        ),
    ] = 16
    prefix_cache: Annotated[
        bool, _key("reuse the KV cache of a prompt's beginning; the tokens are the same either way")
    ] = True
    aging_ms: Annotated[
        int,
        _key(
            "a request that waits for so long counts as one priority more urgent, so that none waits for ever; what "
            "has risen is served for a twentieth of that at a time",
            "milliseconds",
            ge=1,
            le=86_400_000,
        ),
    ] = 2000
    slow_cycle_us: Annotated[
        int, _key("gaps between two rounds longer than this are counted in stats", "microseconds", ge=1, le=10**9)
    ] = 10_000
    watchdog_ms: Annotated[
        int,
        _key(
            "without progress for this long, health says stalled; a GPU that answers nothing for so long has failed",
            "milliseconds",
            ge=10,
            le=3_600_000,
        ),
    ] = 2000


class IoConfig(msgspec.Struct, kw_only=True, frozen=True):
    """The io thread and its socket."""

    core: Annotated[
        int,
        _key("core that the io thread is pinned to; -1: any that is not the computing threads'", ge=-1, le=MAX_CORE),
    ] = -1
    idle: Annotated[Idle, _key("as engine.idle, for the io thread")] = "adaptive"
    priority: Annotated[
        int,
        _key(
            "real-time priority (SCHED_RR) of the io thread: where it shares a core, nobody keeps it waiting; 0: none. "
            "It takes the right to one, as engine.priority does",
            ge=0,
            le=99,
        ),
    ] = 0
    client_stall_ms: Annotated[
        int,
        _key(
            "a client that takes no frame for this long loses the rest of its streams, though not their ends",
            "milliseconds",
            ge=1,
            le=600_000,
        ),
    ] = 250
    max_message_bytes: Annotated[
        int,
        _key(
            "longest message taken from a client; a longer one is refused (too_long), beyond 16 MiB it closes its "
            "connection. All clients together can have the daemon hold eight unfinished ones. 0: room for the longest "
            "request that can be accepted, in any form: 256 KiB + context x (bytes of the vocabulary's longest token "
            "+ 64)",
            "bytes",
            ge=0,
            le=2**30,
        ),
    ] = 0


class RequestsConfig(msgspec.Struct, kw_only=True, frozen=True):
    """What one request may ask for."""

    default_max_tokens: Annotated[
        int, _key("max_tokens of a request that names none", "tokens", ge=1, le=2**31 - 1)
    ] = 256
    max_tokens_limit: Annotated[
        int, _key("largest max_tokens that a request may name", "tokens", ge=1, le=2**31 - 1)
    ] = 131_072


class SessionsConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Conversations that clients keep open: token ids, 4 bytes each; their KV cache is engine.sessions'."""

    per_client: Annotated[int, _key("sessions that one client may have open", ge=0, le=MAX_OPEN)] = 16
    total: Annotated[int, _key("sessions that all clients together may have open", ge=0, le=MAX_OPEN)] = 256
    hold_timeout_s: Annotated[
        float,
        _key(
            "an answer that is held is dropped where nobody commits it for this long", "seconds", ge=0.001, le=1_000_000
        ),
    ] = 30.0


class GrammarsConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Schemas, regular expressions and grammars that requests bring: each is compiled in a child process first."""

    time_limit_s: Annotated[
        float,
        _key("what takes longer to compile is refused (invalid_grammar)", "seconds", ge=0.01, le=3600),
    ] = 2.0
    memory_bytes: Annotated[
        int,
        _key(
            "what takes more memory to compile is refused; all that are kept compiled take no more together, and those "
            "of waiting and running requests as much again (busy)",
            "bytes",
            ge=2**20,
            le=2**40,
        ),
    ] = 256 << 20
    source_bytes: Annotated[
        int,
        _key("a longer schema, expression or grammar is refused", "bytes", ge=16, le=MAX_GRAMMAR_BYTES),
    ] = MAX_GRAMMAR_BYTES
    cache_entries: Annotated[
        int,
        _key(
            "grammars that are kept compiled for the next request with the same, those used last the longest",
            ge=0,
            le=65536,
        ),
    ] = 64


class SpeculationConfig(msgspec.Struct, kw_only=True, frozen=True):
    """How tokens are drafted for requests that do not say; it decides how fast they come, never which they are."""

    default: Annotated[
        Literal["bundle", "none", "suffix", "medusa", "eagle", "dflash", "draft", "auto"],
        _key("drafter of a request that names none; bundle: the one of the bundle's recipe"),
    ] = "bundle"
    max_tree: Annotated[
        int,
        _key(
            "most tokens of one verification for a request that names none; 0: the bundle's",
            "tokens",
            ge=0,
            le=MAX_TREE,
        ),
    ] = 0
    adaptive: Annotated[
        bool,
        _key(
            "draft where measurements say that it pays. false, for tests and benchmarks: draft in every round, as many "
            "tokens as max_tree allows, whatever that costs. A round stays plain where the drafter has no proposal "
            "(suffix: no match), where it reads a prompt's end, and where it may emit one token only"
        ),
    ] = True
    past_outputs: Annotated[
        int,
        _key(
            "generated tokens of whichever client's requests that the suffix drafter remembers and drafts from, the "
            "newest, about 40 bytes each; 0: it knows each request's own text only. -1: "
            f"{_PAST_OUTPUTS}, or 0 where there is a journal",
            "tokens",
            ge=-1,
            le=MAX_PAST_OUTPUTS,
        ),
    ] = -1
    past_outputs_file: Annotated[
        str,
        _key(
            'file that keeps them over a restart, written once a minute and at a clean stop; "": they are in memory '
            "only"
        ),
    ] = ""


class JournalConfig(msgspec.Struct, kw_only=True, frozen=True):
    """A record of every request on disk, hash-chained: docs/journal.md."""

    path: Annotated[
        str,
        _key(
            "file of the journal, or an existing directory for a journal.jsonl in it; full files are kept beside it. "
            '"": no journal'
        ),
    ] = ""
    required: Annotated[
        bool,
        _key(
            "refuse new requests (journal_unavailable) while no record can be written. false: such records are "
            "dropped, counted and told of"
        ),
    ] = False
    rotate_mb: Annotated[
        int, _key("size at which a file is full and the next begins; 0: none", "MiB", ge=0, le=1_000_000)
    ] = 256
    keep: Annotated[int, _key("full files that are kept, the oldest are deleted; 0: all", ge=0, le=1_000_000)] = 0
    fsync: Annotated[
        Literal["always", "interval", "never"],
        _key(
            "when records are forced to the disk: always behind each write, every fsync_interval_ms, or when the "
            "kernel likes; no request waits for it"
        ),
    ] = "interval"
    fsync_interval_ms: Annotated[
        int, _key("with fsync = interval: how old a record gets at most", "milliseconds", ge=1, le=3_600_000)
    ] = 200


class AccessConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Who may connect by tcp, and how much one client may ask for: docs/security.md."""

    server_key: Annotated[
        str,
        _key(
            "file with this daemon's CURVE key (`ull keys server`). Every tcp endpoint is then encrypted, and open to "
            'the clients of access.clients only. "": none, see insecure_tcp'
        ),
    ] = ""
    clients: Annotated[
        str,
        _key(
            "file with the clients that may connect by tcp (`ull keys new`): name, role and public key in each line. "
            "SIGHUP has it read again; who is no longer in it is disconnected"
        ),
    ] = ""
    requests_per_s: Annotated[
        float,
        _key(
            "generate requests that one client may send, over time; more are answered busy. A client is a key of "
            "access.clients, a user of this machine, or an address, with all its connections. 0: no limit",
            "requests per second",
            ge=0,
            le=1_000_000,
        ),
    ] = 0.0
    burst: Annotated[int, _key("of them, how many at once after a pause", "requests", ge=1, le=1_000_000)] = 32
    in_flight: Annotated[
        int,
        _key(
            "generate requests of one client that have not ended; more are answered busy. 0: no limit",
            ge=0,
            le=1_000_000,
        ),
    ] = 0
    sessions: Annotated[
        int,
        _key("sessions that one client may have open on all its connections together; 0: no limit", ge=0, le=MAX_OPEN),
    ] = 0


class MetricsConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Figures for Prometheus, served by a process of their own: docs/monitoring.md. They need the extra `ops`."""

    listen: Annotated[
        str,
        _key('host:port that Prometheus asks, such as 127.0.0.1:9464; whoever reaches it reads them. "": none'),
    ] = ""
    compat: Annotated[Literal["none", "vllm"], _key("the same figures once more under the names that others know")] = (
        "none"
    )
    otlp: Annotated[
        str,
        _key(
            "where a span of each request goes, by OpenTelemetry over HTTP, such as http://127.0.0.1:4318; it needs "
            'metrics.listen and the extra `otel`. "": nowhere'
        ),
    ] = ""


class LogConfig(msgspec.Struct, kw_only=True, frozen=True):
    """The log on standard error: one line per accepted request and one per refused one."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], _key("least severe line that is written; requests are info")
    ] = "info"
    prompts: Annotated[
        bool,
        _key("requests' lines have the first 1000 characters of their prompts. false: no text of theirs is logged"),
    ] = False
    format: Annotated[Literal["text", "json"], _key("text: key=value pairs; json: one object per line")] = "text"


class Config(msgspec.Struct, kw_only=True, frozen=True):
    """Everything that the daemon can be told."""

    listen: Annotated[
        list[str],
        _key(
            "endpoints to serve, ipc:///path or tcp://address:port (IPv6 in brackets; port 0: any, READY names it). "
            "[]: the socket that clients connect to where they are told nothing: ull.sock in $XDG_RUNTIME_DIR, else in "
            "/run/user/UID, else in /tmp/ull-UID, which nobody else may write to"
        ),
    ] = []
    insecure_tcp: Annotated[
        bool,
        _key(
            "serve tcp beyond the loopback interface without encryption or authentication, where there is no "
            "access.server_key"
        ),
    ] = False
    ipc_mode: Annotated[int, _key("file mode of an ipc socket: who may connect", "octal", ge=0, le=0o777)] = 0o660
    verify: Annotated[
        Literal["sizes", "hashes"],
        _key("how the bundle is checked at start: sizes of its files, or also every SHA-256 (reads all of it)"),
    ] = "sizes"
    lock_memory: Annotated[
        Literal["auto", "require", "off"],
        _key("keep the daemon's memory out of swap (mlockall): auto warns where it is not permitted, require stops"),
    ] = "auto"
    placement: Annotated[
        Literal["auto", "off"],
        _key(
            "where no core is given for the engine: auto pins the computing threads to the last cores that no other "
            "daemon of ull computes on, and keeps all its other threads off them, if one core is left for these; off "
            "leaves all to the kernel. READY names the cores that clients should avoid. Either way the engine offers "
            "its core to others between layers; with cores given it does not"
        ),
    ] = "auto"
    drain_timeout_s: Annotated[
        float,
        _key(
            "after SIGTERM, accepted requests may run on for this long, then are cancelled",
            "seconds",
            ge=0,
            le=1_000_000,
        ),
    ] = 30.0
    engine: EngineConfig = EngineConfig()
    io: IoConfig = IoConfig()
    requests: RequestsConfig = RequestsConfig()
    sessions: SessionsConfig = SessionsConfig()
    grammars: GrammarsConfig = GrammarsConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    journal: JournalConfig = JournalConfig()
    access: AccessConfig = AccessConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()

    @property
    def past_outputs(self) -> int:
        """Tokens of past outputs that are kept: where the deployment keeps a record of its own, none unasked."""
        if self.speculation.past_outputs >= 0:
            return self.speculation.past_outputs
        return 0 if self.journal.path else _PAST_OUTPUTS


def load_config(path: Path | None, overrides: dict[str, Any] | None = None) -> Config:
    """The configuration in the file `path` (None: the defaults) with `overrides` ("engine.core" -> value) on top.

    Raises ConfigError naming the key: unknown (with the nearest name), of a wrong type, or out of its range.
    """
    text = ""
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except PermissionError as error:
            raise ConfigError(denial(path)) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    return parse_config(text, overrides, origin=str(path) if path is not None else "configuration")


def parse_config(text: str, overrides: dict[str, Any] | None = None, origin: str = "configuration") -> Config:
    """As load_config, from TOML text."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: not valid TOML: {error}") from error
    for dotted, value in (overrides or {}).items():
        *sections, key = dotted.split(".")
        table = values
        for section in sections:
            table = table.setdefault(section, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{origin}: {section} is a table, not a value", section)
        table[key] = value
    _refuse_unknown(values, Config, "", origin)
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at ")
        key = place.strip("`").removeprefix("$.")
        said = _choices(values, key) or f"{message[:1].lower()}{message[1:]}"
        raise ConfigError(f"{origin}: {key}: {said}", key) from error
    _check(config, origin)
    return config


def parse_override(assignment: str) -> tuple[str, Any]:
    """Splits `KEY=VALUE` of the command line; the value is TOML, or a plain string where it is not."""
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set takes KEY=VALUE, not {assignment!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()


def default_toml() -> str:
    """Every key with its meaning, unit and default, as a TOML file that parses to exactly the defaults."""
    return "\n".join(_toml_lines(Config(), "")).strip() + "\n"


def _check(config: Config, origin: str) -> None:
    """Rules that join several keys, or that a type cannot express."""
    _check_listen(config, origin)
    if 0 < config.io.max_message_bytes < _LEAST_MESSAGE:
        raise ConfigError(
            f"{origin}: io.max_message_bytes is 0, or at least {_LEAST_MESSAGE}, not {config.io.max_message_bytes}",
            "io.max_message_bytes",
        )
    engine = config.engine
    if any(not 0 <= core <= MAX_CORE for core in engine.cores) or len(set(engine.cores)) != len(engine.cores):
        raise ConfigError(f"{origin}: engine.cores needs different core numbers, 0 to {MAX_CORE}", "engine.cores")
    if engine.cores and engine.core not in (-1, engine.cores[0]):
        raise ConfigError(
            f"{origin}: engine.core is {engine.core}, but engine.cores begins with {engine.cores[0]}", "engine.core"
        )
    if engine.cores and engine.threads and engine.threads != len(engine.cores):
        raise ConfigError(
            f"{origin}: engine.threads is {engine.threads}, but engine.cores names {len(engine.cores)}",
            "engine.threads",
        )
    if config.io.priority and config.io.idle == "spin" and config.io.core < 0:
        raise ConfigError(
            f"{origin}: io.priority with io.idle = spin keeps everybody else off a core for ever: give io.core one of "
            "its own, or set io.idle = adaptive",
            "io.priority",
        )
    if bool(config.access.server_key) != bool(config.access.clients):
        missing = "access.clients" if config.access.server_key else "access.server_key"
        raise ConfigError(f"{origin}: {missing} is needed too: `ull keys` makes both files", missing)
    if config.metrics.otlp and not config.metrics.listen:
        raise ConfigError(f"{origin}: metrics.otlp needs metrics.listen: one process does both", "metrics.listen")
    if config.metrics.otlp and not config.metrics.otlp.startswith(("http://", "https://")):
        raise ConfigError(f"{origin}: metrics.otlp is {config.metrics.otlp!r}: write http://host:port", "metrics.otlp")
    if config.metrics.listen:
        try:
            parse_address(config.metrics.listen, "metrics.listen")
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error.message}", "metrics.listen") from None
    if config.journal.required and not config.journal.path:
        raise ConfigError(f"{origin}: journal.required needs journal.path: where to write", "journal.required")
    if config.speculation.past_outputs_file and not config.past_outputs:
        reason = "it is 0" if config.speculation.past_outputs == 0 else "with a journal it is 0 unless it is set"
        raise ConfigError(
            f"{origin}: speculation.past_outputs_file needs speculation.past_outputs: {reason}",
            "speculation.past_outputs_file",
        )
    if config.requests.default_max_tokens > config.requests.max_tokens_limit:
        raise ConfigError(
            f"{origin}: requests.default_max_tokens is above requests.max_tokens_limit", "requests.default_max_tokens"
        )


def _check_listen(config: Config, origin: str) -> None:
    """Raises ConfigError for an endpoint that cannot be served, is named twice, or is too open."""
    served: dict[str, str] = {}
    for endpoint in config.listen:
        try:
            check_endpoint(endpoint)
        except ConfigError as error:
            raise ConfigError(f"{origin}: listen: {error.message}", "listen") from None
        if not config.access.server_key and not config.insecure_tcp and not local_endpoint(endpoint):
            raise ConfigError(
                f"{origin}: listen: {endpoint} is reachable from other machines, without encryption or "
                "authentication; set access.server_key, use a loopback address, or set insecure_tcp = true",
                "listen",
            )
        name = same_endpoint(endpoint)
        if name is not None and name in served:
            both = "" if served[name] == endpoint else f": {served[name]} and {endpoint} are the same"
            raise ConfigError(f"{origin}: listen names an endpoint twice{both}", "listen")
        if name is not None:
            served[name] = endpoint


def _choices(values: dict[str, Any], key: str) -> str | None:
    """What the key `key` may be, and is not, if its type is a choice of words and its value a text."""
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    words = words_of(Config, key)
    return f"must be one of {', '.join(words)}; not {value!r}" if words and isinstance(value, str) else None


def _refuse_unknown(values: dict[str, Any], struct: type[msgspec.Struct], prefix: str, origin: str) -> None:
    """Raises for the first key that `struct` does not have, with the most similar name that it has."""
    types = get_type_hints(struct)
    for key, value in values.items():
        if key not in types:
            names = list(_all_keys(Config, ""))
            near = difflib.get_close_matches(prefix + key, names, 1, 0.5) or [
                name for name in names if name.rpartition(".")[2] == key
            ]
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{origin}: unknown key {prefix}{key}{hint}", prefix + key)
        if isinstance(value, dict) and isinstance(types[key], type) and issubclass(types[key], msgspec.Struct):
            _refuse_unknown(value, types[key], f"{prefix}{key}.", origin)


def _all_keys(struct: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    for name, kind in get_type_hints(struct).items():
        yield prefix + name
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _all_keys(kind, f"{prefix}{name}.")


def _toml_lines(values: msgspec.Struct, prefix: str) -> Iterator[str]:
    """The lines of one table; sub-tables follow the plain keys, as TOML wants it."""
    types = get_type_hints(type(values), include_extras=True)
    for name, kind in types.items():
        value = getattr(values, name)
        if isinstance(value, msgspec.Struct):
            continue
        base, meta = get_args(kind)[:2]
        yield from _comment(_describe(base, meta))
        yield f"{name} = {_toml_value(value, meta)}"
        yield ""
    for name in types:
        value = getattr(values, name)
        if isinstance(value, msgspec.Struct):
            yield f"# {(type(value).__doc__ or '').strip()}"
            yield f"[{prefix}{name}]"
            yield from _toml_lines(value, f"{prefix}{name}.")


def _describe(kind: Any, meta: Meta) -> str:
    """Meaning, then in brackets the unit, the choices and the range."""
    unit = (meta.extra or {}).get("unit")
    facts = [unit] if unit else []
    if get_origin(kind) is Literal:
        facts.append(" | ".join(get_args(kind)))
    if unit != "octal":
        if meta.ge is not None and meta.le is not None:
            facts.append(f"{meta.ge} to {meta.le}")
        elif meta.ge is not None:
            facts.append(f"at least {meta.ge}")
    return f"{meta.description}" + (f" [{'; '.join(facts)}]" if facts else "")


def _comment(text: str) -> Iterator[str]:
    line = "#"
    for word in text.split():
        if len(line) + 1 + len(word) > _LINE:
            yield line
            line = "#"
        line += f" {word}"
    yield line


def _toml_value(value: Any, meta: Meta) -> str:
    if (meta.extra or {}).get("unit") == "octal":
        return f"0o{value:o}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item, meta) for item in value) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
