"""Servers and routers of several releases on one machine."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from testing.conditions import wait_until
from testing.fleets import slowed
from testing.fleets.fault_folder import FOLDER_VARIABLE, switched_on
from testing.fleets.router_view import uses_all_servers
from testing.fleets.stack import FAULTS_FOLDER, STOP_DEADLINE_S
from testing.protocol import last_release
from testing.repository import ROOT
from twinfang.flags.table import BUNDLED_MODEL
from twinfang.stack.ports import LOOPBACK, free_ports, ports_held

FIRST_START_DEADLINE_S = 600.0
"""The last release compiles its CPU kernels when it first starts. On a busy machine its servers are ready
minutes after those of today."""


@dataclass(frozen=True)
class Release:
    """A program, and the folder whose modules it runs."""

    name: str
    program: str = "twinfang"
    folder: Path = ROOT


TODAY = Release("today", slowed.MODULE)
LATER = Release("later", "testing.deploy.later_release")


def last(folder: Path) -> Release:
    """Unpacks the last release below ``folder``, unless an earlier run has done so. If ``folder`` stays, so
    do the CPU kernels that the release compiles when it first starts.

    Raises :class:`LookupError` if the repository lacks its commit, as a shallow clone does.
    """
    facts = last_release()
    place = folder / facts["commit"]
    if not place.exists():
        _unpack(facts["commit"], place)
    return Release(facts["release"], folder=place)


def _unpack(commit: str, place: Path) -> None:
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False)
    if packed.returncode:
        raise LookupError(packed.stderr.decode())
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        unpacked = Path(folder) / "release"
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(unpacked, filter="data")
        try:
            unpacked.replace(place)
        except OSError:
            if not place.exists():  # no other process was faster
                raise


@dataclass
class Processes:
    """Running processes; they end together."""

    folder: Path
    flags: tuple[str, ...] = ()
    """Flags of all servers."""
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ports: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Holds the ports of all processes, so that no other test takes one before they listen."""

    def server(self, release: Release, role: str) -> str:
        """Starts a server and returns its address."""
        port, metrics = self._held_ports(2)
        ports = ("--port", port, "--metrics-port", metrics)
        self._start(release, f"{LOOPBACK}:{port}", role, "--model", str(BUNDLED_MODEL), *ports, *self.flags)
        return f"{LOOPBACK}:{port}"

    def router(self, release: Release, prefill: list[str], decode: list[str], *flags: str) -> str:
        """Starts a router of these servers and returns its URL."""
        (port,) = self._held_ports(1)
        servers = [one for address in prefill for one in ("--prefill", address)]
        servers += [one for address in decode for one in ("--decode", address)]
        self._start(release, f"{LOOPBACK}:{port}", "router", "--port", port, *servers, *flags)
        return f"http://{LOOPBACK}:{port}"

    def until_ready(self, url: str) -> None:
        """Waits until a router is ready and uses all its servers. No process may have ended before."""

        def ended() -> list[str]:
            return [address for address, process in self._running.items() if process.poll() is not None]

        what = f"the router at {url} uses all its servers"
        wait_until(lambda: ended() or uses_all_servers(url), what, FIRST_START_DEADLINE_S)
        assert not ended(), self.log(ended()[0])

    def slow_steps(self) -> contextlib.AbstractContextManager[None]:
        """Makes today's decode servers rest for 100 ms before each step inside the block, so that their
        answers keep running on any machine."""
        return switched_on(self._faults, "slower-steps")

    @property
    def _faults(self) -> Path:
        return self.folder / FAULTS_FOLDER

    def signal(self, address: str, number: signal.Signals) -> None:
        self._running[address].send_signal(number)

    def log(self, address: str) -> str:
        return self._log(address).read_text(encoding="utf-8")

    def end(self) -> None:
        self._ports.close()
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise

    def _held_ports(self, count: int) -> list[str]:
        ports = [str(port) for port in free_ports(count)]
        self._ports.enter_context(ports_held(f"{LOOPBACK}:{port}" for port in ports))
        return ports

    def _start(self, release: Release, address: str, *arguments: str) -> None:
        with self._log(address).open("ab") as log:
            self._running[address] = subprocess.Popen(
                [sys.executable, "-m", release.program, *arguments],
                cwd=release.folder,  # which comes first where Python looks for modules
                env=os.environ | {"PYTHONPATH": str(release.folder), FOLDER_VARIABLE: str(self._faults)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _log(self, address: str) -> Path:
        return self.folder / f"{address.replace(':', '-')}.log"


@contextlib.contextmanager
def processes(folder: Path, *flags: str) -> Iterator[Processes]:
    running = Processes(folder, flags)
    (folder / FAULTS_FOLDER).mkdir()
    try:
        yield running
    finally:
        running.end()
