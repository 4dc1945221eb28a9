"""`ull chat`: a conversation in the terminal. Ctrl-C cancels the answer, a second one (or Ctrl-D) quits.

It is held in a session, so that each turn reads only what is new. What a cancelled answer had come to stays in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
from types import FrameType
from typing import Any

from ull.client import Session, Stream
from ull.client.options import GENERATE_OPTIONS
from ull.commands.connection import client_of
from ull.commands.flags import NOT_IN_CHAT, add_options, given_options
from ull.commands.generate import print_text
from ull.errors import RequestError
from ull.wire import Message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ull chat`."""
    add_options(parser, GENERATE_OPTIONS - NOT_IN_CHAT)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--template-kwargs",
        dest="chat_template_kwargs",
        type=_json_object,
        metavar="JSON",
        help="variables of the chat template, such as '{\"enable_thinking\": false}'",
    )


def run(options: argparse.Namespace) -> int:
    """Runs `ull chat` until the end of input or a Ctrl-C at the prompt."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    with client_of(options) as client:
        engine = client.info().engine
        if not engine["chat_template"]:
            raise RequestError(
                "bad_request", f"{engine['name']} has no chat template; use `ull generate` instead", "messages"
            )
        if sys.stdin.isatty():
            print(f"{engine['name']} at {client.url}. Ctrl-C cancels an answer, Ctrl-D quits.")
        with client.open_session() as session:
            return _converse(session, options)


def _converse(session: Session, options: argparse.Namespace) -> int:
    """Turn by turn until the end of input or a Ctrl-C at the prompt; returns the exit status."""
    history = [Message(role="system", content=options.system)] if options.system else []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if line.strip():
            _turn(session, history, line, options)


def _turn(session: Session, history: list[Message], line: str, options: argparse.Namespace) -> None:
    """One question and its answer, both appended to `history`. The oldest turns go when the context is full."""
    history.append(Message(role="user", content=line))
    while True:
        try:
            answer = _answer(session, history, options)
        except RequestError as error:
            first = next((index for index, message in enumerate(history) if message.role != "system"), len(history))
            if error.code != "too_long" or len(history) - first < 3:
                history.pop()
                print(f"ull: {error}", file=sys.stderr)
                return
            del history[first : first + 2]
            print("(the conversation no longer fits the context: its oldest turn is forgotten)", file=sys.stderr)
            continue
        history.append(Message(role="assistant", content=answer))
        return


def _answer(session: Session, history: list[Message], options: argparse.Namespace) -> str:
    """Streams the answer; what was written before a Ctrl-C counts as the answer.

    A Ctrl-C cancels the request, once there is one, and interrupts nothing here: no frame is lost. A second one does.
    """
    pressed: list[int] = []
    stream: Stream | None = None

    def interrupt(number: int, _: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt
        if stream is not None:
            stream.cancel()

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        stream = session.generate(history, **given_options(options))
        with stream:
            if pressed:
                stream.cancel()
            text = print_text(stream)
            reason = stream.result().finish_reason
            if reason == "cancelled":
                print("(cancelled)")
            elif reason == "timeout":
                print(f"(timed out after {options.timeout:g} s)", file=sys.stderr)
            elif reason == "deadline":
                print(f"(not done by its deadline of {options.deadline:g} s)", file=sys.stderr)
            return text
    finally:
        signal.signal(signal.SIGINT, previous)


def _json_object(text: str) -> dict[str, Any]:
    """The JSON object in an argument. Raises ArgumentTypeError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('not a JSON object such as {"enable_thinking": false}')
    return value
