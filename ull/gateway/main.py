"""The command line of `ull-gateway`, and its server."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ull import __version__
from ull.access import unreadable
from ull.completion import add_completion
from ull.endpoints import check_url
from ull.errors import ConfigError, UllError
from ull.gateway.keys import Keys, new_key
from ull.log import LEVELS, Log

if TYPE_CHECKING:
    from starlette.types import ASGIApp

EXIT_CANNOT_START = 1
CONNECT_TIMEOUT_S = 2.0
SHUTDOWN_S = 5  # for answers that are under way when the gateway is stopped
_MISSING = "ull-gateway needs the extra `gateway`: pip install 'ull[gateway]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves as the command line says. Returns the exit status; wrong usage raises SystemExit."""
    options = parser().parse_args(arguments)
    try:
        if options.new_key is not None:
            key, line = new_key(options.new_key)
            print(f"{key}\n", f"# a line for the file of --api-keys:\n{line}", sep="")
            return 0
        _check(options)
        return _serve(options)
    except UllError as error:
        print(f"ull-gateway: {error.message}", file=sys.stderr)
    except OSError as error:
        print(
            f"ull-gateway: cannot listen on {options.host}:{options.port}: {error.strerror or error}", file=sys.stderr
        )
    return EXIT_CANNOT_START


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        "ull-gateway", description="Serves a daemon's engine over HTTP, as OpenAI's API, with a page to try it."
    )
    command.add_argument("--connect", metavar="URL", help="the daemon; default: this user's socket")
    command.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, metavar="P", help="default: 8000; 0: any that is free")
    command.add_argument("--api-keys", type=Path, metavar="FILE", help="who may ask: lines of a name and a key's hash")
    command.add_argument("--new-key", metavar="NAME", help="print a new key and its line for the file, and end")
    command.add_argument(
        "--allow-anyone", action="store_true", help="listen without keys on an address that others can reach"
    )
    command.add_argument(
        "--max-connections", type=int, default=1024, metavar="N", help="further ones are refused (default: 1024)"
    )
    command.add_argument(
        "--max-body", type=int, metavar="BYTES", help="of one request (default: what the engine's context can take)"
    )
    command.add_argument(
        "--read-timeout", type=float, default=30.0, metavar="S", help="for a request to arrive whole (default: 30)"
    )
    command.add_argument(
        "--stall-timeout", type=float, default=30.0, metavar="S", help="of clients that read nothing (default: 30)"
    )
    command.add_argument("--retell-prompt", type=Path, metavar="FILE", help="what agents are told in Retell's calls")
    command.add_argument("--retell-greeting", default="", metavar="TEXT", help="what they say first (default: nothing)")
    command.add_argument(
        "--retell-max-tokens", type=int, default=256, metavar="N", help="of one thing that they say (default: 256)"
    )
    command.add_argument("--log-level", choices=LEVELS, default="info", help="default: info")
    command.add_argument("--log-format", choices=("text", "json"), default="text", help="default: text")
    command.add_argument("--version", action="version", version=f"ull-gateway {__version__}")
    add_completion(command)
    return command


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for what cannot be meant."""
    if options.connect is not None:
        check_url(options.connect)
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, not {options.port}", "port")
    for name in ("max_connections", "max_body", "read_timeout", "stall_timeout", "retell_max_tokens"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {value}", name)
    if options.api_keys is None and not options.allow_anyone and not _is_loopback(options.host):
        raise ConfigError(
            f"{options.host} can be reached by others: give --api-keys FILE, or say --allow-anyone", "api-keys"
        )


def _text(path: Path | None) -> str:
    """The text in a file. Raises ConfigError: it cannot be read."""
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = unreadable(path, error) if isinstance(error, OSError) else f"{path} is no text in UTF-8"
        raise ConfigError(reason, "retell-prompt") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _serve(options: argparse.Namespace) -> int:
    try:
        from ull.gateway.app import make_app
        from ull.gateway.daemon import Daemon
        from ull.gateway.doors import Settings
        from ull.gateway.retell import CallSettings
        from ull.gateway.server import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "ull":
            raise
        raise ConfigError(f"{_MISSING} (there is no module {error.name})", "gateway") from None
    log = Log(options.log_level, options.log_format)
    keys = None if options.api_keys is None else Keys(options.api_keys)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
        calls = CallSettings(_text(options.retell_prompt), options.retell_greeting, options.retell_max_tokens)
        settings = Settings(options.read_timeout, options.stall_timeout, options.max_body)

        def make() -> ASGIApp:
            return make_app(Daemon(options.connect, CONNECT_TIMEOUT_S), settings, keys, log, calls)

        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        serve(make, listener, options.max_connections, options.read_timeout, SHUTDOWN_S)
    return 0
