"""A server of a model's files, over real HTTP, that fails as servers and networks do."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from twinfang.fetch import file_fetch


@dataclass
class FileServer:
    """What it serves, how it fails, and what it was asked."""

    files: dict[str, bytes]
    """By path, without the leading slash."""
    headers: dict[str, dict[str, str]] = field(default_factory=dict)
    """Further headers of the answers to a path. With ``Location`` the answer is a redirect."""
    etags: dict[str, str] = field(default_factory=dict)
    """In place of one made from the content."""
    cut_after: int | None = None
    """An answer breaks off after so many bytes."""
    statuses: list[int] = field(default_factory=list)
    """The next answers, in place of the file."""
    heeds_if_range: bool = True
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    bytes_sent: int = 0
    url: str = ""

    def add_sums(self, folder: str = "model") -> None:
        lines = [
            f"{hashlib.sha256(content).hexdigest()}  {path.removeprefix(f'{folder}/')}\n"
            for path, content in self.files.items()
        ]
        self.files[f"{folder}/SHA256SUMS"] = "".join(lines).encode()

    def asked(self, path: str) -> list[dict[str, str]]:
        """Return the headers of all requests for a path."""
        return [headers for asked, headers in self.requests if asked == path]

    def etag(self, path: str) -> str:
        return self.etags.get(path) or f'"{hashlib.sha256(self.files[path]).hexdigest()[:7]}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    file_server: FileServer

    def do_GET(self) -> None:
        server = self.file_server
        path, _, query = self.path.lstrip("/").partition("?")
        server.queries.append(query)
        server.requests.append((path, dict(self.headers.items())))
        own = server.headers.get(path, {})
        if server.statuses:
            self._answer(server.statuses.pop(0), b"", own)
        elif "Location" in own:
            self._answer(302, b"", own)
        elif path not in server.files:
            self._answer(404, b"", {})
        else:
            content, etag = server.files[path], server.etag(path)
            span, validator = self.headers.get("Range"), self.headers.get("If-Range")
            if span is None or (server.heeds_if_range and validator != etag):
                self._answer(200, content, own | {"ETag": etag})
                return
            start = int(span.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self._answer(416, b"", {})
                return
            place = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._answer(206, content[start:], own | {"ETag": etag, "Content-Range": place})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        cut = self.file_server.cut_after
        sent = body if cut is None else body[:cut]
        self.wfile.write(sent)
        self.file_server.bytes_sent += len(sent)
        if len(sent) < len(body):
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_fetch, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def serve() -> Iterator[Any]:
    """Starts a server: ``serve(files)``."""
    running: list[ThreadingHTTPServer] = []

    def start(files: dict[str, bytes]) -> FileServer:
        server = FileServer(files)
        handler = type("Handler", (_Handler,), {"file_server": server})
        http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=http.serve_forever, args=(0.01,), name="file server").start()
        running.append(http)
        server.url = f"http://127.0.0.1:{http.server_port}"
        return server

    yield start
    for http in running:
        http.shutdown()
        http.server_close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory that the model becomes."""
    return tmp_path / "models" / "tiny"
