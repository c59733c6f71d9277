"""Metrics pages: their addresses, their samples, and the changes from one page to a later page."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from twinfang.autoscale.histogram import Histogram
from wire.http.address import host_port

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
MAX_PAGE_BYTES = 16 << 20
NEEDS_ROLE = "give --router-token-file a key that has the role view there"

Series = tuple[str, frozenset[tuple[str, str]]]
"""A sample's name and labels."""


@dataclass(frozen=True)
class Page:
    """One process's metrics at one moment."""

    address: str
    read_s: float
    """When the page was read, by the monotonic clock."""
    samples: Mapping[Series, float]

    @classmethod
    def parse(cls, address: str, read_s: float, text: str) -> Page:
        """Parses a page. Raises ValueError if ``text`` is no metrics page."""
        samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return cls(address, read_s, samples)

    def sum(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples that have at least these labels."""
        return sum(value for series, value in self.samples.items() if _has(series, name, labels))

    @property
    def started_s(self) -> float:
        """When the process started. After a restart the value is a different one."""
        return self.sum("process_start_time_seconds")


@dataclass(frozen=True)
class PageChange:
    """The increase of one process's counters between one page and a later page."""

    before: Page
    now: Page

    @property
    def seconds(self) -> float:
        return self.now.read_s - self.before.read_s

    def sum(self, name: str, **labels: str) -> float:
        """Returns by how much a counter has grown. A series that was not on the earlier page counts as 0."""
        return sum(
            max(0.0, value - self.before.samples[series])
            for series, value in self.now.samples.items()
            if _has(series, name, labels) and series in self.before.samples
        )

    def histogram(self, name: str, **labels: str) -> Histogram:
        cumulative: dict[float, float] = {}
        for series, value in self.now.samples.items():
            if _has(series, f"{name}_bucket", labels) and series in self.before.samples:
                bound = float(dict(series[1])["le"])
                gained = max(0.0, value - self.before.samples[series])
                cumulative[bound] = cumulative.get(bound, 0.0) + gained
        return Histogram.of(cumulative, self.sum(f"{name}_sum", **labels))


def _has(series: Series, name: str, labels: Mapping[str, str]) -> bool:
    return series[0] == name and labels.items() <= series[1]


@dataclass(frozen=True)
class Unread:
    """A process whose page could not be read."""

    address: str
    reason: str


@dataclass(frozen=True)
class Trust:
    """What one kind of processes has to show."""

    context: ssl.SSLContext
    server_name: str = ""
    """The name in their certificates. Empty: that of the URL."""


class _Connection(http.client.HTTPSConnection):
    """A connection to one address of a name."""

    def __init__(self, address: tuple[str, int], trust: Trust, name: str) -> None:
        super().__init__(*address, timeout=TIMEOUT_S, context=trust.context)
        self._trust, self._name = trust, trust.server_name or name

    def connect(self) -> None:
        plain = socket.create_connection((self.host, self.port), TIMEOUT_S)
        self.sock = self._trust.context.wrap_socket(plain, server_hostname=self._name)


async def read_pages(
    urls: Iterable[str], now_s: float, trust: Trust | None = None, token: str = ""
) -> list[Page | Unread]:
    """Reads the page of every process at each URL. The name of a headless Service stands for all its pods, so
    one URL can have several processes. ``trust`` is for https://. ``token`` is shown to each process."""
    found = await asyncio.gather(*(asyncio.to_thread(_addresses, url) for url in urls))
    reads = [asyncio.to_thread(_read, url, one, now_s, trust, token) for urls in found for url, one in urls]
    return list(await asyncio.gather(*reads))


def _addresses(url: str) -> list[tuple[str, tuple[str, int]]]:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        log.debug("%s has no address now: %s", url, error)
        return []
    return [(url, address) for address in sorted({(str(one[4][0]), port) for one in found})]


def _read(url: str, address: tuple[str, int], now_s: float, trust: Trust | None, token: str) -> Page | Unread:
    parts = urlsplit(url)
    path = parts.path or "/metrics"
    name = host_port(*address) + path
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        assert trust is not None
        connection = _Connection(address, trust, parts.hostname or "")
    else:
        connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Host": parts.netloc} | _shown(token))
        response = connection.getresponse()
        if response.status in (401, 403):
            return Unread(name, f"it answers {response.status}: {NEEDS_ROLE}")
        if response.status != 200:
            return Unread(name, f"it answers {response.status}")
        return Page.parse(name, now_s, response.read(MAX_PAGE_BYTES).decode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Unread(name, str(error) or type(error).__name__)
    finally:
        connection.close()


def _shown(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}
