"""Runs end-to-end tests with mutual TLS: ``pytest tests/end_to_end --with-tls``.

Every stack is started with ``--tls``, and what passes on loopback is captured. Once the tests are over, each
connection to a port of ours must have begun with a ClientHello, and none may show the names of our messages.
Programs that a test starts trust the stacks' authorities through ``SSL_CERT_FILE`` and
``NODE_EXTRA_CA_CERTS``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import certifi
import httpx

from testing.fleets.capture import Capture, capturing
from twinfang.launch import LaunchedStack
from twinfang.own_authority import OwnAuthority

SECRETS = (b"PrefillRequest", b"Submit", b"StepNews", b"HandshakeRe", b"ServerInfo", b"Hello", b"twinfang/")
"""Names in our messages, and the prefix of keys in a group's store."""


class TlsRun:
    """The authorities of all stacks of a run, and their ports."""

    def __init__(self, capture: Capture, trusted: Path) -> None:
        self.ports: set[int] = set()
        self._capture = capture
        self._trusted = trusted
        trusted.write_bytes(Path(certifi.where()).read_bytes())
        for name in ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE"):
            os.environ[name] = str(trusted)

    def note(self, stack: LaunchedStack) -> None:
        """Trust the authority of a stack that is ready, and watch its ports."""
        with self._trusted.open("ab") as file:
            file.write(OwnAuthority(Path(stack.status()["tls_folder"])).ca.read_bytes())
        self.ports |= ports_of(stack)

    def check(self) -> None:
        ours = self._capture.to_ports(self.ports)
        clear = {ends for ends, one in ours.items() if not one.is_tls}
        assert not clear, f"connections {clear} of {len(ours)} did not begin with a ClientHello"
        told = {ends for ends, one in ours.items() if any(one.has(text) for text in SECRETS)}
        assert not told, f"connections {told} of {len(ours)} show names of our messages"
        print(f"\n{len(ours)} connections to {len(self.ports)} ports, all of TLS")


def ports_of(stack: LaunchedStack) -> set[int]:
    """Return the ports on which processes of a stack listen, without those of UCX."""
    processes = stack.processes().values()
    ports = {int(process.address.rpartition(":")[2]) for process in processes}
    return ports | {port for process in processes if (port := httpx.URL(process.metrics_url or "").port)}


current: TlsRun | None = None
"""None: stacks start as their tests say."""


@contextmanager
def tls_run(folder: Path) -> Iterator[None]:
    global current
    with capturing() as capture:
        current = TlsRun(capture, folder / "trusted.pem")
        yield
        run, current = current, None
        run.check()
