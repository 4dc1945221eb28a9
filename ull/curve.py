"""Keys of clients that come over a network: CURVE's key pairs (https://rfc.zeromq.org/spec/26/), in files.

A key file is a client's own, or the daemon's: nobody else may read it. The list of clients has no secrets: a line for
each, its name, role and public key. Keys are written in Z85, 40 characters for 32 bytes.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

import zmq
from zmq.utils import z85

from ull.access import unreadable
from ull.errors import ConfigError

Role = Literal["generate", "admin"]
ROLES: Final = get_args(Role)
KEY_CHARACTERS = 40
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
MAX_CLIENTS = 4096  # lines of a list


@dataclass(frozen=True)
class KeyPair:
    """A public key and the secret one that belongs to it, in Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class CurveKeys:
    """What a client needs to talk to a daemon: its own pair, and the daemon's public key, by which it knows it."""

    public: str
    secret: str = field(repr=False)
    server: str


@dataclass(frozen=True)
class KnownClient:
    """A line of the list of clients."""

    name: str
    role: Role
    public: str


def new_pair() -> KeyPair:
    """A key pair, drawn by the operating system's random numbers."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def raw(key: str, what: str = "key") -> bytes:
    """The 32 bytes of a key in Z85. Raises ConfigError."""
    try:
        if len(key) == KEY_CHARACTERS:
            return z85.decode(key)
    except (KeyError, ValueError, struct.error):  # another character, beyond ASCII, above 32 bits
        pass
    raise ConfigError(f"{what} is no CURVE key: {KEY_CHARACTERS} characters of Z85, as `ull keys` writes it", what)


def check_name(name: str) -> str:
    """Raises ConfigError unless `name` can name a client."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is no name of a client: 1 to 64 letters, digits and ._@-", "name")
    return name


def write_key(path: Path, pair: KeyPair, *, name: str, server: str | None = None) -> None:
    """Writes a key file of mode 0600. `server`: the daemon's public key, in a client's. Raises ConfigError."""
    lines = [f"# The key of {name}: whoever reads this file can pass for it.", f'name = "{name}"']
    lines += [f'public = "{pair.public}"', f'secret = "{pair.secret}"']
    if server is not None:
        lines.append(f'server = "{server}"')
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists: keys are never overwritten; choose another file, or remove it", "out"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror})", "out") from error
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write("\n".join(lines) + "\n")
        file.flush()
        os.fsync(descriptor)


def read_pair(path: Path, what: str = "access.server_key") -> KeyPair:
    """The pair in a key file. Raises ConfigError, also where others may read it."""
    values = _read(path, what)
    return KeyPair(_key(values, "public", path, what), _key(values, "secret", path, what))


def read_client(path: Path, what: str = "key") -> CurveKeys:
    """A client's key file. Raises ConfigError, also where others may read it."""
    values = _read(path, what)
    if "server" not in values:
        raise ConfigError(
            f"{path} has no key of a server: is it the daemon's own? Clients' come from `ull keys new`", what
        )
    return CurveKeys(*(_key(values, name, path, what) for name in ("public", "secret", "server")))


def given_keys(keys: CurveKeys | Path | str | None) -> CurveKeys | None:
    """What a client was given: keys, or the file that has them. Raises ConfigError."""
    return keys if keys is None or isinstance(keys, CurveKeys) else read_client(Path(keys))


def read_clients(path: Path) -> list[KnownClient]:
    """The list of clients. Raises ConfigError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(unreadable(path, error), "access.clients") from error
    known: dict[str, KnownClient] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):  # only there: a key may have a # in it
            continue
        client = _client(words)
        if isinstance(client, str):
            raise ConfigError(f"{path}, line {number}: {client}; write `NAME ROLE PUBLIC-KEY`", "access.clients")
        if client.public in known:
            raise ConfigError(
                f"{path}, line {number}: it is the key of {known[client.public].name} too", "access.clients"
            )
        known[client.public] = client
    if len(known) > MAX_CLIENTS:
        raise ConfigError(f"{path} has more than {MAX_CLIENTS} clients", "access.clients")
    return list(known.values())


def _client(words: list[str]) -> KnownClient | str:
    """The client of a line's words, or what is wrong with them."""
    if len(words) != 3:
        return "it has not three words"
    name, role, public = words
    if _NAME.fullmatch(name) is None:
        return f"{name!r} is no name"
    if role not in ROLES:
        return f"{role!r} is no role: {' or '.join(ROLES)}"
    try:
        raw(public)
    except ConfigError as error:
        return error.message
    return KnownClient(name, "admin" if role == "admin" else "generate", public)


def _read(path: Path, what: str) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(unreadable(path, error), what) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no key file: {error}", what) from error
    if mode & 0o077:
        raise ConfigError(f"{path} has a secret, and others may read it (mode {mode:04o}): chmod 600 it", what)
    return values


def _key(values: dict[str, object], name: str, path: Path, what: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{path} has no `{name}`; `ull keys` writes key files", what)
    try:
        raw(value, what)
    except ConfigError as error:
        raise ConfigError(f"{path}: {name}: {error.message}", what) from None
    return value
