"""What `ull-gateway` adds to a token's way, beside ull's own client over ZeroMQ and over the local transport.

The same request goes in turn to the daemon by `ull.Client` and through the gateway by a client of HTTP that does what
HTTP needs and no more: one connection that is kept, one socket, a parser in C. Both stamp what arrives before they look
at it; a first token's time counts from before the request is encoded. A gap is the time between two pieces of text: a
round each, or more where a busy machine has let rounds come together. The executor is scripted, with a round of two
milliseconds and no time for the prompt: what differs is the way, not the model. `--tiny` takes the tiny engine.

Then one connection streams while 199 others are open at the gateway, most of them idle behind a request that they have
made, some in the middle of a head that never ends; in turn with the same connection alone.

What else a machine does falls on all sides of a turn alike, but not on every pass alike. The bars are held against the
pass in which the ZeroMQ client's gaps had the lowest p99: the peer says which pass was quiet. All are in the report.
"""

from __future__ import annotations

import gc
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import httptools
import numpy as np

import ull
from report import Check, arguments, finish, percentiles
from serving import gateway, scripted, serve, tiny_bundle

TITLE = "gateway"
PASSES = 3
TURNS = {"chat": 340, "completion": 100}  # of each pass
TOKENS = 24  # of an answer
ROUND_NS = 2_000_000
CONNECTIONS = 200
HALF_OPEN = 20  # of them, those that have sent the beginning of a head
BLOCKS = 5  # with the others and without, of each pass
BLOCK_REQUESTS = 10
BLOCK_TOKENS = 60
WARM_UP = 5
TIMEOUT_S = 60.0
OPTIONS: dict[str, Any] = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "speculate": "none"}
TEXT = "def read_lines(path):\n"
PROMPTS: dict[str, Any] = {"chat": [{"role": "user", "content": TEXT}], "completion": TEXT}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
PEER, LOCAL, GATEWAY, OPENAI = "ZeroMQ", "local", "gateway", "gateway by OpenAI's client"

Arrivals = tuple[int, list[int]]  # when a request was begun, and when each piece of its text came; nanoseconds
Ask = Callable[[str, int], Arrivals]  # takes the kind of request, and how many tokens to ask for
Samples = dict[str, list[float]]


class HttpConnection:
    """A connection to the gateway that is kept; asks for streams and stamps their events."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._host = f"{address[0]}:{address[1]}".encode()
        self._socket = socket.create_connection(address, TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = httptools.HttpResponseParser(self)
        self._arrived: list[tuple[int, bytes]] = []
        self._now = 0
        self._done = False

    def ask(self, kind: str, tokens: int) -> Arrivals:
        """One request's times."""
        begun = time.monotonic_ns()
        prompt = {"messages" if kind == "chat" else "prompt": PROMPTS[kind]}
        body = json.dumps({**prompt, **OPTIONS, "max_tokens": tokens, "stream": True}).encode()
        self._socket.sendall(
            b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (PATHS[kind].encode(), self._host, len(body), body)
        )
        self._arrived, self._done = [], False
        while not self._done:
            data = self._socket.recv(1 << 16)
            self._now = time.monotonic_ns()
            if not data:
                raise SystemExit("the gateway has hung up")
            self._parser.feed_data(data)
        return begun, text_times(self._arrived)

    def send_half_a_head(self) -> None:
        """Begins a request that does not go on."""
        self._socket.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: ")

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._arrived.append((self._now, data))

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._done = True

    def __enter__(self) -> HttpConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()


def text_times(arrived: list[tuple[int, bytes]]) -> list[int]:
    """When each event that brings text came; of an event in several parts, when it was whole."""
    times: list[int] = []
    rest = b""
    for now, data in arrived:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            value = event.removeprefix(b"data: ")
            if value == b"[DONE]":
                continue
            chunk = json.loads(value)
            if "error" in chunk:
                raise SystemExit(f"the gateway answers {value.decode()}")
            choice = (chunk.get("choices") or [{}])[0]
            if choice.get("text") or choice.get("delta", {}).get("content"):
                times.append(now)
    if rest or not times:
        raise SystemExit(f"the gateway answers {b''.join(data for _, data in arrived).decode(errors='replace')}")
    return times


def native(client: ull.Client) -> Ask:
    """Asks by ull's own client."""

    def ask(kind: str, tokens: int) -> Arrivals:
        begun = time.monotonic_ns()
        stream = client.generate(PROMPTS[kind], max_tokens=tokens, **OPTIONS)
        return begun, [token.received_ns for token in stream if token.text]

    return ask


@contextmanager
def openai_asks(address: tuple[str, int]) -> Iterator[Ask]:
    """Asks by the package `openai`."""
    import openai

    extra = {name: OPTIONS[name] for name in ("ignore_eos", "speculate")}
    plain = {name: value for name, value in OPTIONS.items() if name not in extra}

    def ask(kind: str, tokens: int) -> Arrivals:
        begun = time.monotonic_ns()
        times = []
        for chunk in client.chat.completions.create(
            model="tiny", messages=PROMPTS[kind], max_tokens=tokens, stream=True, extra_body=extra, **plain
        ):
            now = time.monotonic_ns()
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(now)
        return begun, times

    base = f"http://{address[0]}:{address[1]}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield ask


def add(samples: Samples, series: str, arrivals: Arrivals) -> None:
    """Adds a request's TTFT in milliseconds, and its gaps in microseconds."""
    begun, times = arrivals
    samples[f"TTFT, {series} (ms)"].append((times[0] - begun) / 1e6)
    samples[f"ITL, {series} (us)"] += (np.diff(times) / 1e3).tolist()


def take_turns(asks: dict[str, Ask], kind: str, turns: int, samples: Samples) -> None:
    """The same request by each way, each way as often at each place of a turn."""
    names = list(asks)
    for turn in range(-WARM_UP, turns):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            arrivals = asks[name](kind, TOKENS)
            if turn >= 0:
                add(samples, f"{kind}, {name}", arrivals)


@contextmanager
def others(address: tuple[str, int]) -> Iterator[None]:
    """All connections but one."""
    with ExitStack() as stack:
        for number in range(CONNECTIONS - 1):
            connection = stack.enter_context(HttpConnection(address))
            if number < HALF_OPEN:
                connection.send_half_a_head()
            else:
                connection.ask("completion", 1)
        yield


def crowd(address: tuple[str, int], samples: Samples) -> None:
    """The active connection's gaps with the others open and alone, in blocks: with, without, without, with, ..."""
    with HttpConnection(address) as active:
        for block in range(2 * BLOCKS):
            crowded = block % 4 in (0, 3)
            with others(address) if crowded else ExitStack():
                for _ in range(BLOCK_REQUESTS):
                    add(samples, f"{CONNECTIONS if crowded else 1} connections", active.ask("chat", BLOCK_TOKENS))


def one_pass(url: str, address: tuple[str, int], with_openai: bool) -> Samples:
    """Every comparison once."""
    samples: Samples = defaultdict(list)
    with ExitStack() as stack:
        zeromq = stack.enter_context(ull.Client(url, transport="zeromq"))
        local = stack.enter_context(ull.Client(url, transport="local"))
        asks = {PEER: native(zeromq), LOCAL: native(local)}
        asks[GATEWAY] = stack.enter_context(HttpConnection(address)).ask
        take_turns(asks, "completion", TURNS["completion"], samples)
        if with_openai:
            asks[OPENAI] = stack.enter_context(openai_asks(address))
        take_turns(asks, "chat", TURNS["chat"], samples)
    crowd(address, samples)
    return samples


def quietest(passes: list[Samples]) -> int:
    """The pass in which the peer's gaps had the lowest p99."""
    return int(np.argmin([np.percentile(samples[f"ITL, chat, {PEER} (us)"], 99) for samples in passes]))


def checks_of(samples: Samples) -> list[Check]:
    """The bars: what the gateway adds to each percentile, and what connections that do nothing add to it."""

    def at(percent: float, what: str, series: str) -> float:
        return float(np.percentile(samples[f"{what}, {series} ({'ms' if what == 'TTFT' else 'us'})"], percent))

    checks = []
    for kind in PATHS:
        for percent in (50, 99, 99.9):
            added = at(percent, "TTFT", f"{kind}, {GATEWAY}") - at(percent, "TTFT", f"{kind}, {PEER}")
            bars = (2.0, 0.8) if percent == 50 else (None, None)
            checks.append(Check(f"TTFT, {kind}: p{percent:g} above the ZeroMQ client's", added, "ms", *bars))
        for percent in (50, 99, 99.9):
            added = (at(percent, "ITL", f"{kind}, {GATEWAY}") - at(percent, "ITL", f"{kind}, {PEER}")) / 1e3
            must = 1.0 if percent == 99 else None
            checks.append(Check(f"ITL, {kind}: p{percent:g} above the ZeroMQ client's", added, "ms", must))
    for percent in (50, 99):
        alone, crowded = (at(percent, "ITL", f"{count} connections") for count in (1, CONNECTIONS))
        name = f"ITL p{percent} with {CONNECTIONS} connections, of that with one"
        checks.append(Check(name, crowded / alone, "x", 1.1))
    return checks


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="the tiny engine instead of the scripted executor")
    parser.add_argument("--passes", type=int, default=PASSES, help=f"default {PASSES}")
    options = parser.parse_args()
    gc.freeze()
    daemon = serve(tiny_bundle()) if options.tiny else scripted(tiny_bundle(), {"round_ns": ROUND_NS})
    with daemon, gateway(daemon.url) as address:
        passes = [one_pass(daemon.url, address, find_spec("openai") is not None) for _ in range(options.passes)]
    chosen = quietest(passes)
    rows = [{name: percentiles(values) for name, values in samples.items()} for samples in passes]
    setting = {"executor": "tiny" if options.tiny else "scripted", "pass": chosen, "passes": rows}
    finish(TITLE, {**rows[chosen], **setting}, checks_of(passes[chosen]), options.json)


if __name__ == "__main__":
    main()
