"""What only one process can have at a time: the journal's file, and the address where monitors ask for figures."""

from __future__ import annotations

import dataclasses

from ull.curve import CurveKeys
from ull.daemon.config import Config
from ull.daemon.exporter import Exporter
from ull.daemon.journal import Journal
from ull.daemon.journal_file import JournalFile
from ull.errors import DaemonError
from ull.journal import Header
from ull.log import Log

_FLUSH_S = 2.0  # for the journal's last records


class Exclusive:
    """Opened by a daemon that has no predecessor, or has taken its place; given up for a successor by `close`.

    `header`: of the journal's files. `device`: the GPU that monitors are told of, if there is one. `keys`: the daemon's
    own, where tcp needs some.
    """

    def __init__(self, config: Config, header: Header, device: int | None, keys: CurveKeys | None, log: Log) -> None:
        self.journal: Journal | None = None
        self._config = config
        self._header = header
        self._device = device
        self._keys = keys
        self._log = log
        self._exporter: Exporter | None = None
        self._listen = config.metrics.listen

    @property
    def metrics_url(self) -> str | None:
        """Where monitors ask; None: nowhere."""
        return None if self._exporter is None else self._exporter.url

    @property
    def metrics_address(self) -> str:
        """The same as host and port; "": nowhere."""
        return "" if self._exporter is None else self._exporter.address

    def open_journal(self) -> None:
        """Goes on with the journal, if there is to be one. Raises DaemonError."""
        config = self._config.journal
        if config.path:
            self.journal = Journal(config, JournalFile(config, self._header), self._log)

    def open_metrics(self, connect: str, before: str = "") -> None:
        """Has the daemon's endpoint `connect` asked for figures, if it is to be. Raises DaemonError.

        `before`: the address of a predecessor, which stays where any port will do: monitors know it.
        """
        if before and self._listen.endswith(":0"):
            self._listen = before
        if not self._listen:
            return
        metrics = self._config.metrics
        options = {
            "listen": self._listen,
            "connect": connect,
            "compat": metrics.compat,
            "otlp": metrics.otlp,
            "device": self._device,
            "keys": None if self._keys is None else dataclasses.asdict(self._keys),
        }
        self._exporter = Exporter(options, self._log)
        self._listen = self._exporter.address

    def try_metrics(self, connect: str, before: str = "") -> None:
        """The same, of a daemon that serves all the same."""
        try:
            self.open_metrics(connect, before)
        except DaemonError as error:
            self._log.error("metrics", message=f"nobody serves them: {error.message}")

    def close(self) -> None:
        """Gives both up."""
        self.close_metrics()
        journal, self.journal = self.journal, None
        if journal is not None:
            journal.close(_FLUSH_S)

    def close_metrics(self) -> None:
        """Ends the process that monitors ask."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()
