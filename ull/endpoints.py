"""Where a daemon listens and clients connect: what an endpoint may be, and the one that nobody has to name."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
from pathlib import Path

from ull.errors import ConfigError

SOCKET_NAME = "ull.sock"
MAX_IPC_PATH = 107  # bytes; sizeof(sockaddr_un.sun_path) less the terminating zero
MAX_PORT = 65535
_ANY_PORT = "*"


def default_endpoint(run: Path = Path("/run/user"), temporary: Path = Path("/tmp")) -> str:
    """The endpoint of this user's daemon: `ull.sock` in a directory in which nobody else can put one.

    That is $XDG_RUNTIME_DIR; where it is not set or not this user's own, /run/user/UID; where there is none either,
    /tmp/ull-UID, which is made here. Raises ConfigError where that one is in somebody else's hands.
    """
    user = os.geteuid()
    for directory in (Path(os.environ.get("XDG_RUNTIME_DIR", "")), run / str(user)):
        if directory.is_absolute() and _complaint(directory, user) is None:
            return f"ipc://{directory / SOCKET_NAME}"
    directory = temporary / f"ull-{user}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # and is no directory
    except OSError as error:
        raise ConfigError(f"cannot make {directory} for the default socket: {error.strerror}", "listen") from error
    if (complaint := _complaint(directory, user)) is not None:
        raise ConfigError(
            f"{directory}, the place of the default socket, {complaint}: have it removed, set XDG_RUNTIME_DIR, or name "
            "an endpoint",
            "listen",
        )
    return f"ipc://{directory / SOCKET_NAME}"


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError unless `endpoint` is ipc:///path, ipc://@name or tcp://address:port.

    An IPv6 address stands in brackets. A port is 0 to 65535; 0 and * let the kernel choose one.
    """
    transport, separator, address = endpoint.partition("://")
    if not separator or transport not in ("ipc", "tcp") or not address:
        raise ConfigError(f"{endpoint!r} is neither ipc:///path nor tcp://address:port", "listen")
    if transport == "ipc":
        if len(os.fsencode(address)) > MAX_IPC_PATH:
            raise ConfigError(f"the path of {endpoint} is longer than {MAX_IPC_PATH} bytes", "listen")
        return
    host, _, port = address.rpartition(":")
    if not port or not host or (port != _ANY_PORT and not _is_number(port)):
        raise ConfigError(f"{endpoint!r} has no port; write tcp://address:port", "listen")
    if port != _ANY_PORT and int(port) > MAX_PORT:
        raise ConfigError(f"{endpoint}: a port is 0 to {MAX_PORT}, not {port}", "listen")
    _check_host(endpoint, host)


def check_url(url: object) -> None:
    """Raises ConfigError (field "url") unless a client can connect to `url`: ipc:///path or tcp://host:port."""
    if not isinstance(url, str):
        raise ConfigError(f"url must be a text, ipc:///path or tcp://address:port, not {url!r}", "url")
    try:
        check_endpoint(url)
    except ConfigError as error:
        raise ConfigError(error.message, "url") from None


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Host and port of `host:port`, an IPv6 address in brackets. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or (":" in bare) != (bare != host) or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError(f"{field} is {text!r}: write host:port, such as 127.0.0.1:9464", field)
    return bare, int(port)


def same_endpoint(endpoint: str) -> str | None:
    """A text that two endpoints share where only one of them can be served; None where each can (port 0 or *)."""
    transport, _, address = endpoint.partition("://")
    if transport == "ipc":
        path = ipc_path(endpoint)
        return endpoint if path is None else f"ipc://{Path(os.path.realpath(path.parent)) / path.name}"
    host, _, port = address.rpartition(":")
    if port == _ANY_PORT or int(port) == 0:
        return None
    host = host.strip("[]")
    with contextlib.suppress(ValueError):  # a name, or a network interface's
        host = str(ipaddress.ip_address({"localhost": "127.0.0.1", "lo": "127.0.0.1", "*": "0.0.0.0"}.get(host, host)))
    return f"tcp://{host}:{int(port)}"


def local_endpoint(endpoint: str) -> bool:
    """Whether only this machine can reach `endpoint` (ipc, or tcp on a loopback address)."""
    transport, _, address = endpoint.partition("://")
    if transport != "tcp":
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def ipc_path(endpoint: str) -> Path | None:
    """The file of an ipc endpoint; None for tcp and for abstract sockets (ipc://@name)."""
    transport, _, address = endpoint.partition("://")
    return Path(address) if transport == "ipc" and not address.startswith("@") else None


def local_path(path: Path) -> Path | None:
    """The local transport's socket beside the ipc socket `path`; None where the name is too long for one."""
    local = path.with_name(path.name + ".local")
    return local if len(os.fsencode(local)) <= MAX_IPC_PATH else None


def _complaint(directory: Path, user: int) -> str | None:
    """Why others than `user` might put a socket into `directory`, or None."""
    try:
        found = directory.lstat()
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    if found.st_uid != user:
        return f"belongs to another user (uid {found.st_uid}, this is {user})"
    mode = stat.S_IMODE(found.st_mode)
    return f"may be written by others (mode {mode:04o}; chmod 700 mends it)" if mode & 0o022 else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _check_host(endpoint: str, host: str) -> None:
    """Raises ConfigError for an IPv6 address that cannot be one, or has no brackets."""
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise ConfigError(f"{endpoint}: an IPv6 address stands in brackets, tcp://[::1]:5555", "listen")
    if not host.startswith("["):
        return
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        raise ConfigError(f"{endpoint}: {host} is no IPv6 address", "listen") from None
