"""A double of the Hugging Face Hub on loopback: the calls that huggingface_hub makes to look at a model and fetch it.

with HubDouble({"org/tiny": Repository(files_of(directory))}) as hub:
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """A model: its files, the names of its branches, and what it does to those who ask."""

    files: Mapping[str, bytes]
    commit: str = COMMIT
    branches: tuple[str, ...] = ("main",)
    tags: tuple[str, ...] = ()
    gated: bool = False  # the list of files is public, the files are not
    breaks: set[str] = field(default_factory=set)  # files whose transfer ends halfway
    stalls: set[str] = field(default_factory=set)  # files whose transfer stops halfway and stays open


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class HubDouble:
    """Serves `repositories` by their ids. `requests` are the methods and paths that were asked for."""

    def __init__(self, repositories: Mapping[str, Repository]) -> None:
        self.repositories = dict(repositories)
        self.requests: list[str] = []
        self.stalled = threading.Event()  # set once a transfer stalls
        self.broken = False  # answers everything with status 503
        self.released = threading.Event()
        double = self

        class Handler(_Handler):
            hub = double

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="hub-double", daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def fetched(self) -> set[str]:
        """The files that were asked for with GET."""
        paths = [request.removeprefix("GET ") for request in self.requests if request.startswith("GET ")]
        return {path.split("/resolve/")[1].partition("/")[2] for path in paths if "/resolve/" in path}


class _Handler(BaseHTTPRequestHandler):
    hub: HubDouble
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.broken:
            self._send(503, b"busy")
            return
        parts = path.strip("/").split("/")
        of_api = parts[:2] == ["api", "models"]
        words = parts[2:] if of_api else parts
        repository = self.hub.repositories.get("/".join(words[:2]))
        if repository is None:
            self._send(401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
            return
        kind = words[2] if len(words) > 2 else "revision"
        rest = words[3:] or ["main"]
        revision, name = (rest[0], "/".join(rest[1:])) if kind == "resolve" else ("/".join(rest), "")
        if revision not in (*repository.branches, repository.commit):
            self._send(404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
        elif kind == "revision":
            siblings = [{"rfilename": name} for name in repository.files]
            about = {"id": "/".join(words[:2]), "sha": repository.commit, "siblings": siblings}
            self._send_json({**about, "tags": list(repository.tags), "gated": "auto" if repository.gated else False})
        elif kind == "tree":
            self._send_json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in repository.files.items()
                ]
            )
        else:
            self._send_file(repository, name, with_body)

    def _send_file(self, repository: Repository, name: str, with_body: bool) -> None:
        if repository.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        data = repository.files.get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        start = 0
        if (wanted := self.headers.get("Range")) is not None and wanted.startswith("bytes="):
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": repository.commit}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._head(206 if start else 200, len(data) - start, headers)
        if not with_body:
            return
        if name in repository.breaks | repository.stalls:
            self.wfile.write(data[start : start + (len(data) - start) // 2])
            self.wfile.flush()
            if name in repository.stalls:
                self.hub.stalled.set()
                self.hub.released.wait()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(data[start:])

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._head(status, len(data), headers or {})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()
