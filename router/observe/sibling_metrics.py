"""Merges the metrics of several router processes that share one port into one answer.

A scrape reaches any one of the processes. The metrics of each process carry its index in the label
``process``, as if each process were a separate instance. So sums and rates over the processes are right,
and counters never go back. Metrics that servers count would be the same from every process, so they are shown
once.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import ssl
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from router.config import ProcessPlace
from router.http.sockets import LOOPBACK

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
PATH_OF_ONE = "/metrics/process"


async def metrics_of_siblings(
    place: ProcessPlace, trust: ssl.SSLContext | None = None, *, with_keys: bool
) -> dict[int, str]:
    """Return the other processes' own metrics, by index, with or without those of single keys. A process that
    does not answer is missing.

    ``trust``: they speak HTTPS."""
    others = {i: port for i, port in enumerate(place.ports) if i != place.index}
    secret = place.secret if with_keys else ""
    texts = await asyncio.gather(*(asyncio.to_thread(_ask, port, secret, trust) for port in others.values()))
    return {i: text for i, text in zip(others, texts, strict=True) if text is not None}


def merged(texts: Mapping[int, str]) -> bytes:
    """Merge the processes' own metrics, given by index, into one text for Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Merged(texts))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, texts: Mapping[int, str]) -> None:
        self._texts = texts

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for index, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text):
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "process": str(index)}
                    known.add_sample(sample.name, labels, sample.value)
        yield from families.values()
        answered = GaugeMetricFamily("twinfang_router_processes", "Processes that answered this scrape.")
        answered.add_metric([], len(self._texts))
        yield answered


def _ask(port: int, secret: str, trust: ssl.SSLContext | None) -> str | None:
    connection = (
        http.client.HTTPConnection(LOOPBACK, port, timeout=TIMEOUT_S)
        if trust is None
        else http.client.HTTPSConnection(LOOPBACK, port, timeout=TIMEOUT_S, context=trust)
    )
    try:
        connection.request(
            "GET", PATH_OF_ONE, headers={"Authorization": f"Bearer {secret}"} if secret else {}
        )
        response = connection.getresponse()
        return response.read().decode() if response.status == 200 else None
    except (OSError, http.client.HTTPException) as error:
        log.warning("the router process at port %d gave no metrics: %s", port, error)
        return None
    finally:
        connection.close()
