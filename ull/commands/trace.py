"""`ull trace`: where the time of a token goes, as a trace for Perfetto, and as a picture."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from ull.commands.connection import client_of
from ull.errors import UsageError
from ull.trace.chrome import chrome_json
from ull.trace.collect import ClientStamps, Position, Trace
from ull.trace.picture import draw

_LOOK_S = 0.2  # between two looks, so that nothing is written over before it is read
_END_S = 5.0  # for a request's end to be told


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The command's own options."""
    command.add_argument("prompt", nargs="?", metavar="TEXT", help="a request to trace, its client's stamps with it")
    command.add_argument("--max-tokens", type=int, default=32, metavar="N", help="of that request (default: 32)")
    command.add_argument(
        "--seconds", type=float, metavar="S", help="without TEXT: trace what others ask for so long (default: 5)"
    )
    command.add_argument(
        "--output", "-o", type=Path, default=Path("trace.json"), metavar="FILE", help="for https://ui.perfetto.dev"
    )
    command.add_argument("--png", type=Path, metavar="FILE", help="the timeline as a picture too (extra `ops`)")


def run(options: argparse.Namespace) -> int:
    """Traces, writes the files, says in a line what is in them."""
    if options.prompt is not None and options.seconds is not None:
        raise UsageError("give a TEXT, or --seconds to trace what others ask, not both")
    seconds = 5.0 if options.seconds is None else options.seconds
    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds must be above 0 and at most 3600, not {seconds:g}")
    trace = Trace()
    with client_of(options) as client:
        position = Position()
        position.skip(client)
        if options.prompt is not None:
            sent_ns = time.monotonic_ns()
            stream = client.generate(options.prompt, max_tokens=options.max_tokens)
            stamps = ClientStamps(stream.id, sent_ns)
            stamps.received = [(token.received_ns, len(token.ids)) for token in stream]
            trace.clients.append(stamps)
            deadline = time.monotonic() + _END_S  # its record comes just behind its last frame
            while not trace.requests and time.monotonic() < deadline:
                position.read(client, trace)
        else:
            deadline = time.monotonic() + seconds
            while (left := deadline - time.monotonic()) > 0:
                time.sleep(min(_LOOK_S, left))
                position.read(client, trace)
    options.output.write_text(json.dumps(chrome_json(trace)), encoding="utf-8")
    if options.png is not None:
        draw(trace, options.png)
    requests, records = len(trace.requests), len(trace.records)
    print(f"{options.output}: {requests} request{'s' * (requests != 1)}, {records} steps and frames")
    return 0
