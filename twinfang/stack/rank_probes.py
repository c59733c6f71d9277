"""One port that tells of all ranks of a host, for those who look at one alone: a kubelet's probes do."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector

from telemetry.probe_port import ProbePort

ANSWER_S = 1.0
"""A rank that takes longer to say whether it is ready is not."""


@contextmanager
def probing(host: str, port: int, ranks: Mapping[str, str]) -> Iterator[ProbePort]:
    """``/readyz`` is 200 when that of every rank is; ``/healthz`` says that somebody is here who starts them
    anew. ``ranks``: where each one's own HTTP port is, by name.

    Raises :class:`ConfigError` for a port that is taken."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    probes = ProbePort(host, port, registry, lambda: not_ready(ranks), flag="--probe-port")
    try:
        yield probes
    finally:
        probes.close()


def not_ready(ranks: Mapping[str, str]) -> str | None:
    """What the first that is not says. Asked anew each time: none is taken for ready because it was."""
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
