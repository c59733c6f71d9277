"""Where an OpenAI endpoint is, the key that it asks for, and HTTP clients that know both."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from wire.errors import ConfigError

KEY_VARIABLE = "TWINFANG_API_KEY"
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"
"""Used only for loopback and over https: it may be the key of another service."""
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI endpoint."""

    base_url: str
    """Ends without a slash; ``/chat/completions`` follows it."""
    timeout_s: float
    """Longest time that a request may bring nothing."""
    api_key: str = field(default="", repr=False)

    def client(self) -> httpx2.Client:
        """Returns a client for one request at a time."""
        return httpx2.Client(
            headers=self._headers(),
            timeout=self._timeout(),
            trust_env=not self._is_loopback,
            auth=_no_other_auth,
        )

    def async_client(self, num_connections: int) -> httpx2.AsyncClient:
        """Returns a client for up to ``num_connections`` requests at a time."""
        return httpx2.AsyncClient(
            headers=self._headers(),
            timeout=self._timeout(),
            limits=httpx2.Limits(max_connections=num_connections, max_keepalive_connections=num_connections),
            trust_env=not self._is_loopback,
            auth=_no_other_auth,
        )

    @property
    def _is_loopback(self) -> bool:
        return is_loopback(self.base_url)

    def _timeout(self) -> httpx2.Timeout:
        return httpx2.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S)

    def _headers(self) -> dict[str, str]:
        headers = {"User-Agent": "twinfang"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers


def endpoint_of(values: argparse.Namespace, environment: Mapping[str, str]) -> Endpoint:
    """Returns the endpoint that the flags name. Raises :class:`ConfigError` if its key can't be read."""
    return Endpoint(values.base_url, values.timeout, _key(values.api_key_file, values.base_url, environment))


def is_loopback(url: str) -> bool:
    """Returns whether the URL's host is this machine by its name or address. Such requests use no proxy."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _no_other_auth(request: httpx2.Request) -> httpx2.Request:
    """Keeps the client from sending a password of ~/.netrc in place of the API key."""
    return request


def _key(path: Path | None, url: str, environment: Mapping[str, str]) -> str:
    if path is not None:
        try:
            key, source = path.read_text(encoding="ascii").strip(), f"`api_key_file` {path}"
        except (OSError, ValueError) as error:
            raise ConfigError(f"`api_key_file` {path} can't be read: {error}") from error
        if not key:
            raise ConfigError(f"`api_key_file` {path} has no key: it should have one line")
    else:
        source = KEY_VARIABLE if environment.get(KEY_VARIABLE) else OPENAI_KEY_VARIABLE
        key = environment.get(source, "").strip()
        if source == OPENAI_KEY_VARIABLE and not (url.startswith("https:") or is_loopback(url)):
            return ""
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{source} has no usable key: expected one line of ASCII, without spaces")
    return key
