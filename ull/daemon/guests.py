"""Who may come in by tcp: the daemon's key, the list of clients, and a pair of keys for the daemon's own errands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ull import _native
from ull.curve import CurveKeys, new_pair, raw, read_clients, read_pair
from ull.daemon.config import AccessConfig
from ull.libzmq import loaded_libsodium

_OWN_NAME = "ulld"  # of the daemon itself, as a client of its own


class Guests:
    """Reads the files of `config` (both are named). Raises ConfigError, also where others may read the secret."""

    def __init__(self, config: AccessConfig) -> None:
        self._clients = Path(config.clients)
        self._pair = read_pair(Path(config.server_key))
        own = new_pair()  # lives as long as this process: the rehearsal and the exporter use it
        self.own = CurveKeys(own.public, own.secret, self._pair.public)
        self._list = _native.AllowList()
        self.read()

    def read(self) -> int:
        """Reads the list of clients (again); returns how many there are. Raises ConfigError, and changes nothing."""
        known = read_clients(self._clients)
        entries = [(raw(client.public), client.name, client.role == "admin") for client in known]
        self._list.set([*entries, (raw(self.own.public), _OWN_NAME, True)])
        return len(known)

    def options(self) -> dict[str, Any]:
        """What the io thread is told."""
        return {
            "libsodium": loaded_libsodium(),
            "curve_secret": raw(self._pair.secret),
            "curve_clients": self._list,
        }
