"""One port that reports on all ranks of a host, because a kubelet's probes look at only one port."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, ProcessCollector

from telemetry.probe_port import ProbePort
from twinfang.stack.readiness import connection_to

if TYPE_CHECKING:
    from wire.tls.identity import Identity

ANSWER_S = 1.0
"""A rank that takes longer to answer counts as not ready, and as one that hangs."""


@contextmanager
def probing(
    host: str, port: int, ranks: Mapping[str, str], identity: Identity | None = None
) -> Iterator[ProbePort]:
    """Serves ``/readyz``, which answers 200 if every rank's ``/readyz`` does, and ``/healthz``, which answers
    200 unless a rank hangs. ``ranks``: the URL of each rank's own HTTP port, by name.

    Raises :class:`ConfigError` for a port that is taken."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    probes = ProbePort(
        host,
        port,
        registry,
        partial(not_ready, ranks),
        hang=partial(hang, ranks),
        flag="--probe-port",
        identity=identity,
    )
    try:
        yield probes
    finally:
        probes.close()


def not_ready(ranks: Mapping[str, str]) -> str | None:
    """Returns why the first unready rank is not ready. It asks the ranks anew in each call; earlier answers
    don't count."""
    for name, url in ranks.items():
        try:
            status, said = _ask(url, "/readyz")
        except (OSError, http.client.HTTPException) as error:
            return f"{name} does not answer at {urlsplit(url).netloc}: {error}"
        if status != http.client.OK:
            return f"{name}: {said}"
    return None


def hang(ranks: Mapping[str, str]) -> str | None:
    """Returns how the first rank that hangs does so. A rank that is not there does not hang: the process that
    asks starts it again."""
    for name, url in ranks.items():
        try:
            status, said = _ask(url, "/healthz")
        except TimeoutError:
            return f"{name} does not answer at {urlsplit(url).netloc} within {ANSWER_S:g} s"
        except (OSError, http.client.HTTPException):
            continue
        if status != http.client.OK:
            return f"{name}: {said}"
    return None


def _ask(url: str, path: str) -> tuple[int, str]:
    """Returns status and text of a rank's answer."""
    connection = connection_to(url, timeout_s=ANSWER_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace").strip()
    finally:
        connection.close()
