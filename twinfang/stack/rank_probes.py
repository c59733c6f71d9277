"""One port that reports on all ranks of a host, because a kubelet's probes look at only one port."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector

from telemetry.probe_port import ProbePort

ANSWER_S = 1.0
"""A rank that takes longer to answer counts as not ready."""


@contextmanager
def probing(host: str, port: int, ranks: Mapping[str, str]) -> Iterator[ProbePort]:
    """Serves ``/readyz``, which answers 200 if every rank's ``/readyz`` does, and ``/healthz``, which shows
    that the process that restarts the ranks is alive. ``ranks``: the address of each rank's own HTTP port, by
    name.

    Raises :class:`ConfigError` for a port that is taken."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    probes = ProbePort(host, port, registry, lambda: not_ready(ranks), flag="--probe-port")
    try:
        yield probes
    finally:
        probes.close()


def not_ready(ranks: Mapping[str, str]) -> str | None:
    """Returns why the first unready rank is not ready. It asks the ranks anew in each call; earlier answers
    don't count."""
    for name, address in ranks.items():
        connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
        try:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            said = answer.read().decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            return f"{name} does not answer at {address}: {error}"
        finally:
            connection.close()
        if answer.status != http.client.OK:
            return f"{name}: {said}"
    return None
