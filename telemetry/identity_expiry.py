"""When the certificate expires that this process shows to Twinfang's other processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from wire.tls.identity import Identity


class IdentityExpiry(Collector):
    """The metric of one process's identity."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "twinfang_tls_certificate_expiry_timestamp_seconds",
            "When the certificate for mutual TLS between processes expires, or the first of its chain, in "
            "seconds since 1970.",
            value=self._identity.current.expires_s,
        )
