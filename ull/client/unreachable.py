"""Why no daemon answers at an endpoint, and what to do about it."""

from __future__ import annotations

import grp
import os
import socket
import stat
import threading
from pathlib import Path

from ull.access import user_name
from ull.endpoints import ipc_path

_LOOK_S = 1.0  # for finding out why nobody answers
_RUNNING = "is ulld running?"
_STRANGER = "something listens there, but it does not answer as ulld does"


def why_nobody(url: str) -> str:
    """The likely reason why no daemon answers at `url`, with its remedy. Takes a second at most."""
    address = url.partition("://")[2]
    if url.startswith("ipc"):
        path = ipc_path(url)
        return _why_nobody_at(address.replace("@", "\0", 1)) if path is None else _why_nobody_at(str(path))
    found: list[str] = []
    looking = threading.Thread(target=lambda: found.append(_why_nobody_on(*_host_and_port(address))), daemon=True)
    looking.start()  # no limit can be set to a look-up of a name
    looking.join(_LOOK_S)
    return found[0] if found else f"neither the name service nor {address} has answered"


def permission_denied(path: Path) -> str:
    """Why the socket file `path` refuses this user, and the remedy."""
    user = user_name(os.geteuid())
    denied = f"permission to connect to {path} is denied"
    try:
        status = path.stat()
    except OSError:
        return f"{denied}: {user} may not enter its directory"
    mode = stat.S_IMODE(status.st_mode)
    if not mode & stat.S_IWGRP or status.st_gid == 0:
        return f"{denied}: it is {user_name(status.st_uid)}'s, mode {mode:04o}; ulld's user and `ipc_mode` decide"
    group, members = _group(status.st_gid)
    if user in members:
        return f"{denied}: {user} is in its group {group} since after this login; log in again"
    return f"{denied}: only its group {group} may; `sudo usermod -aG {group} {user}`, then log in again"


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(";")[2].rpartition(":")  # libzmq: source;host:port
    return host.strip("[]"), port


def _why_nobody_at(path: str) -> str:
    """`path` is a unix socket's; an abstract one's begins with a zero byte."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return f"there is no file {path}; {_RUNNING}"
        except PermissionError:
            return permission_denied(Path(path))
        except ConnectionRefusedError:
            name = "@" + path[1:] if path.startswith("\0") else path
            if path == name and not stat.S_ISSOCK(Path(path).stat().st_mode):
                return f"{path} is not a socket"
            return f"nobody listens on {name}; {_RUNNING}"
        except BlockingIOError:
            return _STRANGER
        except OSError as error:
            return f"{error.strerror or error}"
    return _STRANGER


def _why_nobody_on(host: str, port: str) -> str:
    try:
        socket.create_connection((host, int(port)), timeout=_LOOK_S).close()
    except socket.gaierror as error:
        return f"the host {host!r} is not known ({error.strerror})"
    except ConnectionRefusedError:
        return f"nobody listens on port {port} of {host}; {_RUNNING}"
    except (OSError, ValueError, OverflowError) as error:
        return f"port {port} of {host} cannot be reached: {error}"
    return _STRANGER


def _group(number: int) -> tuple[str, list[str]]:
    try:
        entry = grp.getgrgid(number)
    except KeyError:
        return str(number), []
    return entry.gr_name, entry.gr_mem
