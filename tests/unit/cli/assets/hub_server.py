"""A hub on this machine, over HTTP, as far as huggingface_hub's own client asks one; with a real
one's accidents.

Large files are redirected to a second server, as the hub sends them to another host. ``accidents``
maps a file's path to what befalls its next downloads: a number cuts the connection after so many
bytes, "corrupt" changes a byte, "whole" ignores Range (as the real one does where it compresses),
"stall" sends 1.5 MB and then nothing until the hub is closed. The listing, redirects with Range,
the headers of errors, and those of a HEAD for each file are what the client reads.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

LARGE = 1 << 16
COMMIT = "a" * 40


class FakeHub:
    """Repositories ``models/ORG/NAME`` and ``datasets/ORG/NAME``, each with its files."""

    def __init__(self, repositories: dict[str, dict[str, bytes]], token: str | None = None) -> None:
        self.repositories, self.token = repositories, token
        self.accidents: dict[str, list[int | str]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # server, path, headers
        self.closing = threading.Event()
        self.stalled = threading.Event()
        self._servers = [_Server(("127.0.0.1", 0), self, name) for name in ("hub", "cdn")]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def cdn(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def downloads(self, path: str) -> list[str | None]:
        """The Range header of each download of a file."""
        return [
            headers.get("Range")
            for server, asked, headers in self.requests
            if asked.endswith(path) and (server == "cdn" or "/resolve/" in asked)
        ]

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,)) for server in self._servers
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            for server in self._servers:
                server.shutdown()
                server.server_close()
            for thread in threads:
                thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], hub: FakeHub, name: str) -> None:
        super().__init__(address, _Handler)
        self.hub, self.name = hub, name


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        hub, path = self.server.hub, unquote(urlparse(self.path).path)
        hub.requests.append((self.server.name, path, dict(self.headers)))
        if self.server.name == "cdn":
            repository, file = re.fullmatch(
                r"/((?:models|datasets)/[^/]+/[^/]+)/(.+)", path
            ).groups()
            return self._content(hub.repositories[repository][file], file)
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._answer(
                401, b'{"error": "who are you"}', {"X-Error-Message": "Invalid credentials"}
            )
        if found := re.fullmatch(
            r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path
        ):
            return self._describe(*found.groups())
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind, name, _, file = found.groups()
            return self._resolve((kind or "models/") + name, file)
        return self._answer(404, b"{}")

    def do_HEAD(self) -> None:
        """Answer what the client asks of a file before it downloads it."""
        hub, path = self.server.hub, unquote(urlparse(self.path).path)
        found = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        assert found is not None, path
        kind, name, _, file = found.groups()
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._head(401, 0, {})
        repository = (kind or "models/") + name
        entry = _entry(file, data := hub.repositories[repository][file])
        digest = entry.get("lfs", entry)["oid"]
        return self._head(200, len(data), {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})

    def _describe(self, repository: str, kind: str | None, revision: str | None) -> None:
        files = self.server.hub.repositories.get(repository)
        if files is None or revision not in (None, "main", COMMIT):
            return self._answer(
                404,
                b"{}",
                {"X-Error-Code": "RepoNotFound" if files is None else "RevisionNotFound"},
            )
        if kind != "tree":
            name = repository.partition("/")[2]
            return self._answer(
                200, json.dumps({"id": name, "sha": COMMIT, "private": False}).encode()
            )
        return self._answer(
            200, json.dumps([_entry(path, data) for path, data in files.items()]).encode()
        )

    def _resolve(self, repository: str, file: str) -> None:
        data = self.server.hub.repositories[repository].get(file)
        if data is None:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        if len(data) < LARGE:
            return self._content(data, file)
        return self._answer(
            302, b"", {"Location": f"{self.server.hub.cdn}/{repository}/{file}?signature=SIGNED"}
        )

    def _content(self, data: bytes, file: str) -> None:
        accident, headers = None, {}
        if accidents := self.server.hub.accidents.get(file):
            accident = accidents.pop(0)
        first = (
            int(found[1])
            if (found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")))
            else 0
        )
        if accident == "whole":
            first = 0
        status, part = (206, data[first:]) if first else (200, data)
        if first:
            headers = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        if accident == "corrupt":
            part = bytes([part[0] ^ 1]) + part[1:]
        if not isinstance(accident, int) and accident != "stall":
            return self._answer(status, part, headers)
        self._head(status, len(part), headers)
        self.wfile.write(part[: accident if isinstance(accident, int) else 12 << 17])
        self.wfile.flush()
        if accident == "stall":
            self.server.hub.stalled.set()
            self.server.hub.closing.wait(60)
        self.close_connection = True
        return None

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(body), headers)
        self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str] | None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob}
    if len(data) >= LARGE:
        entry["lfs"] = {
            "oid": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "pointerSize": 134,
        }
    return entry
