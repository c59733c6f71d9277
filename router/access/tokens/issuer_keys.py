"""Keeps the public keys of a token issuer up to date.

They come from a file, or from an address: the given one, or the one that the issuer's OpenID configuration
names. A token may be signed with a key that was published a moment ago. Then the keys are read again, but not
more often than once in :data:`PAUSE_S`: tokens with made-up keys must not become requests to the issuer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.access.tokens.public_keys import PublicKey, PublicKeys
from router.background import cancel_and_wait
from router.config import TokenIssuer
from wire.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)

REFRESH_S = 300.0
"""How often an address is asked for the keys. A key that the issuer takes back is refused after that time."""
PAUSE_S = 10.0
"""The least time between two questions, whatever tokens come, and however the last one ended."""
LOOK_INTERVAL_S = 1.0
FETCH_TIMEOUT_S = 5.0
MAX_BYTES = 256 << 10
HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity"}
DISCOVERY_PATH = "/.well-known/openid-configuration"


class KeySource(Protocol):
    """Where the keys are."""

    interval_s: float
    """Time between two looks that no token has caused."""

    async def read(self) -> bytes | None:
        """Return the key set; None if it is as it was. Raises :class:`OSError` or :class:`ValueError`."""


class KeySetFile:
    """A key set in a file."""

    interval_s = LOOK_INTERVAL_S

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, int, int] | None = None

    def read_now(self) -> bytes | None:
        version_before, self._version = self._version, None  # a file that comes back is read again
        stat = self._path.stat()
        version = stat.st_ino, stat.st_size, stat.st_mtime_ns
        if version == version_before:
            self._version = version
            return None
        if stat.st_size > MAX_BYTES:
            raise ValueError(f"it has {stat.st_size} bytes, the limit is {MAX_BYTES}")
        self._version = version
        return self._path.read_bytes()

    async def read(self) -> bytes | None:
        return self.read_now()


class KeySetAddress:
    """A key set at an address. Redirects are not followed."""

    interval_s = REFRESH_S

    def __init__(self, address: str, issuer: str) -> None:
        """``address``: empty if the issuer's configuration names it."""
        self._address, self._issuer = address, issuer
        self._trusted: ssl.SSLContext | None = None
        """The machine's certificates. To read them takes long, so a thread does it, once."""

    async def read(self) -> bytes:
        import httpx2

        try:
            if self._trusted is None:
                self._trusted = await asyncio.to_thread(ssl.create_default_context)
            async with httpx2.AsyncClient(
                timeout=FETCH_TIMEOUT_S, follow_redirects=False, verify=self._trusted
            ) as client:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    address = self._address or await self._discover(client)
                    return await self._get(client, address)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise OSError(str(error) or type(error).__name__) from error
        except TimeoutError:
            raise OSError(f"no answer within {FETCH_TIMEOUT_S:g} s") from None

    async def _discover(self, client: httpx2.AsyncClient) -> str:
        found = json.loads(await self._get(client, self._issuer.rstrip("/") + DISCOVERY_PATH))
        if not isinstance(found, dict) or found.get("issuer") != self._issuer:
            raise ValueError(f"the OpenID configuration is not that of {self._issuer}")
        address = found.get("jwks_uri")
        if not isinstance(address, str) or not is_safe(address):
            raise ValueError("the OpenID configuration names no https:// address of keys (jwks_uri)")
        return address

    async def _get(self, client: httpx2.AsyncClient, address: str) -> bytes:
        content = b""
        async with client.stream("GET", address, headers=HEADERS) as response:
            if response.status_code != 200:
                raise OSError(f"{address} answered {response.status_code}")
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_BYTES:
                    raise ValueError(f"{address} answered with more than {MAX_BYTES} bytes")
        return content


def is_safe(address: str) -> bool:
    """Return whether nobody between here and ``address`` can replace what is read there."""
    parts = urlsplit(address)
    if parts.scheme != "http":
        return parts.scheme == "https" and bool(parts.hostname)
    try:
        return parts.hostname == "localhost" or ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


class IssuerKeys(Collector):
    """The keys that are known now. If they can't be read, the known ones stay in use."""

    def __init__(
        self,
        source: KeySource,
        issuer: str,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source, self._issuer, self._now = source, issuer, now
        self.known = PublicKeys()
        self._problem = ""
        self._read_s: float | None = None
        self._tried_s: float | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, settings: TokenIssuer) -> IssuerKeys:
        """Return the keys of an issuer. A file is read at once. Raises :class:`ConfigError` if a file can't
        be read or an address is not safe. An address that does not answer is no error: it may come later."""
        where = settings.keys
        if where and "://" not in where:
            source = KeySetFile(Path(where))
            keys = cls(source, settings.issuer)
            try:
                keys._use(source.read_now())
            except (OSError, ValueError) as error:
                raise ConfigError(f"`jwt_keys` can't be used: {where}: {error}") from error
            return keys
        if not is_safe(where or settings.issuer):
            raise ConfigError(
                f"the keys of tokens can't be read safely from {where or settings.issuer!r}: give an "
                "https:// address, an http:// address on loopback, or a file as `jwt_keys`"
            )
        return cls(KeySetAddress(where, settings.issuer), settings.issuer)

    async def find(self, kid: str | None) -> PublicKey | None:
        """Return the key that a token names; None if the issuer has no such key. Raises
        :class:`UnavailableError` if no keys could be read yet."""
        found = self.known.find(kid)
        if found is None and self._may_try:
            await self._read()
            found = self.known.find(kid)
        if found is None and not self.known.keys:
            raise UnavailableError.told("the keys of the token's issuer can't be read now; try again later")
        return found

    async def watch(self) -> None:
        """Read the keys again and again, until this task is cancelled."""
        while True:
            if self._tried_s is None or self._may_try or self._source.interval_s < PAUSE_S:
                await self._read()
            is_well = bool(self.known.keys) and not self._problem
            await asyncio.sleep(self._source.interval_s if is_well else min(PAUSE_S, self._source.interval_s))

    async def close(self) -> None:
        """End a reading that is under way."""
        if self._reading is not None:
            await cancel_and_wait(self._reading)

    @property
    def _may_try(self) -> bool:
        is_reading = self._reading is not None
        return is_reading or self._tried_s is None or self._now() - self._tried_s >= PAUSE_S

    async def _read(self) -> None:
        """Read the keys. All who want them at the same time wait for one reading, which goes on if one of
        them goes away."""
        if self._reading is None:
            self._tried_s = self._now()
            self._reading = asyncio.create_task(self._read_once())
        await asyncio.shield(self._reading)

    async def _read_once(self) -> None:
        try:
            self._use(await self._source.read())
        except (OSError, ValueError, RecursionError) as error:
            if self._problem != str(error):
                self._problem = str(error) or type(error).__name__
                log.error(
                    "the keys of the issuer %s can't be read, %d known ones stay in use: %s",
                    *(self._issuer, len(self.known.keys), self._problem),
                )
        finally:
            self._reading = None

    def _use(self, text: bytes | None) -> None:
        """Use the keys in ``text``, or those of the last time (None). Raises :class:`ValueError`."""
        if text is None:
            self._read_s = self._read_s if self._problem else self._now()
            return
        before, self.known = self.known, PublicKeys.parse(text)
        if self.known != before:
            log.info("keys of the issuer %s: %s", self._issuer, ", ".join(self.known.names))
        self._problem, self._read_s = "", self._now()

    def collect(self) -> Iterable[Metric]:
        age = GaugeMetricFamily(
            "twinfang_issuer_keys_age_seconds",
            "Time since the keys of the token issuer were last read. They are missing if they never were.",
        )
        if self._read_s is not None:
            age.add_metric([], self._now() - self._read_s)
        yield age
