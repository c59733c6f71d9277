"""What servers have told of themselves, in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from telemetry.handoff_families import handoff_families
from telemetry.speculation_families import speculation_families
from wire.generation import ServerStats

LABELS = ("server",)


class ToldFigures(Collector):
    """Shows figures that servers count themselves, as of the last :meth:`update`."""

    def __init__(self) -> None:
        self._prefill: Mapping[str, ServerStats] = {}
        self._decode: Mapping[str, ServerStats] = {}

    def update(self, prefill: Mapping[str, ServerStats], decode: Mapping[str, ServerStats]) -> None:
        """By address; a server that is not among them is shown no longer."""
        self._prefill, self._decode = prefill, decode

    def collect(self) -> Iterator[Metric]:
        yield from speculation_families(LABELS, _by_labels(self._decode))
        yield from handoff_families(LABELS, _by_labels(self._prefill) | _by_labels(self._decode))


def _by_labels(stats: Mapping[str, ServerStats]) -> dict[tuple[str, ...], ServerStats]:
    return {(address,): one for address, one in stats.items()}
