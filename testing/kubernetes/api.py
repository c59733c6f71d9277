"""Calls of an API server with any token."""

from __future__ import annotations

import ssl
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

CALL_TIMEOUT_S = 60.0
"""Long, because etcd waits for a disk that others use too."""
MENDED = "+reflect2"
MERGE = "application/strategic-merge-patch+json"

Manifest = dict[str, Any]


class RefusedError(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class Api:
    """JSON over HTTPS; the server's certificate is checked."""

    def __init__(self, url: str, token: str, authority: Path) -> None:
        self.url = url
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            verify=ssl.create_default_context(cafile=str(authority)),
            timeout=CALL_TIMEOUT_S,
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def answers(self, path: str) -> bool:
        """Returns whether the API server exists and answers this path with 200."""
        try:
            return self._client.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def version(self) -> tuple[int, int]:
        said = self.get("/version")
        return int(said["major"]), int(said["minor"].rstrip("+"))

    def has_custom_resources(self) -> bool:
        """Returns whether the API server survives custom resources. The reflect2 of versions before 1.24
        crashes it if it is built with Go 1.18 or newer and without the fix (README.md)."""
        return self.version() >= (1, 24) or MENDED in self.get("/version")["gitVersion"]

    def get(self, path: str, **query: str) -> Manifest:
        return self.call("GET", path, query=query)

    def post(self, path: str, body: Manifest) -> Manifest:
        return self.call("POST", path, body)

    def patch(self, path: str, body: Manifest) -> Manifest:
        return self.call("PATCH", path, body, content_type=MERGE)

    def delete(self, path: str, body: Manifest | None = None) -> Manifest:
        return self.call("DELETE", path, body)

    def call(
        self,
        method: str,
        path: str,
        body: Manifest | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """Sends a call and returns the answer; for a watch, its first event. Raises :class:`RefusedError`."""
        headers = {"Content-Type": content_type}
        with self._client.stream(method, path, json=body, params=query, headers=headers) as answer:
            if answer.status_code >= 300:
                answer.read()
                raise RefusedError(answer.status_code, answer.text)
            if (query or {}).get("watch"):
                return {}
            answer.read()
            found: Manifest = answer.json()
            return found
