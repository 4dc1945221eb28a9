"""A daemon that takes clients with keys by tcp, and a wire between the two that may be listened to and damaged."""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from conftest import Daemon, Spawn
from ull.curve import CurveKeys, KeyPair, new_pair, write_key


class Keys:
    """The key files of a daemon and of two clients, alice (admin) and bob (generate), in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = new_pair()
        self.clients: dict[str, KeyPair] = {}
        self.list = directory / "clients"
        write_key(directory / "server.key", self.server, name="ulld")
        for name, role in (("alice", "admin"), ("bob", "generate")):
            self.add(name, role)

    def add(self, name: str, role: str) -> None:
        """One client more."""
        pair = self.clients[name] = new_pair()
        write_key(self.file(name), pair, name=name, server=self.server.public)
        with self.list.open("a") as file:
            file.write(f"{name} {role} {pair.public}\n")

    def file(self, name: str) -> Path:
        """The key file of a client."""
        return self.directory / f"{name}.key"

    def of(self, name: str) -> CurveKeys:
        """A client's keys."""
        return CurveKeys(self.clients[name].public, self.clients[name].secret, self.server.public)

    def settings(self) -> list[str]:
        """What the daemon's command line says of them."""
        return [
            *("--set", f"access.server_key={self.directory / 'server.key'}"),
            *("--set", f"access.clients={self.list}"),
        ]


def spawn_with_keys(spawn: Spawn, keys: Keys, *arguments: str, **options: object) -> Daemon:
    """A daemon that serves tcp (its `url`) to those who have a key, and an ipc socket."""
    ipc = f"ipc://{keys.directory}/s.sock"
    return spawn(*keys.settings(), "--listen", ipc, *arguments, url="tcp://127.0.0.1:0", **options)  # type: ignore[arg-type]


class Wire:
    """A proxy before `url` that shows every piece of bytes to `look` (direction "up" or "down"), which returns it."""

    def __init__(self, url: str, look: Callable[[str, bytes], bytes]) -> None:
        host, port = url.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._look = look
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for name, source, target in (("up", client, server), ("down", server, client)):
                threading.Thread(target=self._carry, args=(name, source, target), daemon=True).start()

    def _carry(self, name: str, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(self._look(name, data))
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
