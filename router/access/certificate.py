"""The router's certificate for HTTPS."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wire.tls.key_pair_files import KeyPairFiles
from wire.tls.key_pair_watch import KeyPairWatch
from wire.tls.server_context import ServerContext

PROTOCOLS = ("http/1.1",)
"""For clients that ask by ALPN."""


class Certificate(Collector):
    """The certificate, replaced while the router serves; its metric says when it expires. Raises
    :class:`ConfigError` if it can't be used at the start."""

    def __init__(self, files: KeyPairFiles) -> None:
        context = ServerContext(PROTOCOLS)
        self._watch = KeyPairWatch(files, context.use)
        self.context: ssl.SSLContext = context.ssl
        """For the sockets that speak HTTPS."""

    @property
    def names(self) -> tuple[str, ...]:
        return self._watch.current.names

    async def watch(self) -> None:
        """Use the files' certificate whenever it changes, until this task is cancelled."""
        await self._watch.watch()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "twinfang_router_certificate_expiry_timestamp_seconds",
            "When the certificate in use expires, or the first of its chain, in seconds since 1970.",
            value=self._watch.current.expires_s,
        )
