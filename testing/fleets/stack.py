"""Real stacks for tests: ``twinfang up`` or ``twinfang serve`` as processes, on their own ports.

    with running_stack("up", "--prefill", "2") as stack:
        httpx.post(f"{stack.url}/v1/completions", json=...)
        stack.stats()["decode-0"].transfer_bytes

Through the fixture ``stacks``, tests of a folder share one stack of the same flags. Tests that kill or freeze
processes start stacks for themselves. A failed test shows the end of the log of each stack that it used. A
folder's ``conftest.py`` switches shared stacks and logs on with

    from testing.fleets.stack import pytest_runtest_makereport, stacks
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from testing.conditions import wait_until
from testing.fleets import slowed, tls_run
from testing.fleets.fault_folder import FOLDER_VARIABLE, switched_on
from testing.fleets.fleet import CALL_TIMEOUT_S, START_DEADLINE_S
from testing.fleets.router_view import uses_all_servers
from testing.forking.start import start_process
from twinfang.launch import LaunchedStack, log_path, stack_arguments
from twinfang.own_authority import OwnAuthority
from twinfang.stack.ports import LOOPBACK, free_ports
from wire.channels import TlsChannels
from wire.messages.generation import GetStats, ServerStats
from wire.rpc import GET_STATS, call, open_channel
from wire.tls.identity import Identity
from wire.tls.peer_names import PeerRole

STOP_DEADLINE_S = 40.0
FAULTS_FOLDER = "faults"


@dataclass(frozen=True)
class Stack(LaunchedStack):
    """A running stack, with methods to look at it and to disturb it."""

    used_by: set[str] = field(default_factory=set)
    """Ids of the tests that got this stack from the fixture."""

    @property
    def authority(self) -> OwnAuthority | None:
        """The authority of a stack with ``--tls``."""
        folder = self.status().get("tls_folder")
        return None if folder is None else OwnAuthority(Path(folder))

    def trust(self) -> ssl.SSLContext | bool:
        """Returns httpx's ``verify`` for the router."""
        return True if self.authority is None else ssl.create_default_context(cafile=str(self.authority.ca))

    def stats(self, *names: str) -> dict[str, ServerStats]:
        """Returns load and memory of the named servers, or of all, by name."""
        servers = [
            process
            for process in self.processes().values()
            if process.name != "router" and (not names or process.name in names)
        ]

        async def ask(name: str) -> ServerStats:
            async with self.channel(name, "operator") as channel:
                reply: ServerStats = await call(channel, GET_STATS, GetStats(), timeout_s=CALL_TIMEOUT_S)
                return reply

        async def ask_all() -> list[ServerStats]:
            return await asyncio.gather(*(ask(server.name) for server in servers))

        answers = run_async(ask_all)
        return {server.name: stats for server, stats in zip(servers, answers, strict=True)}

    def channel(
        self, name: str, role: PeerRole = "router"
    ) -> contextlib.AbstractAsyncContextManager[grpc.aio.Channel]:
        """Opens a channel to a server, with the certificate of ``role`` if the stack has TLS."""
        address = self.processes()[name].address
        if self.authority is None:
            return open_channel(address)
        return TlsChannels(Identity(self.authority.files(role), role))(address)

    def metrics(self, name: str) -> str:
        """Returns the metrics page of a process."""
        url, trust = self.processes()[name].metrics_url, self.trust()
        assert url is not None, f"{name} has no metrics page"
        if self.authority is not None:
            files = self.authority.files("operator")
            assert isinstance(trust, ssl.SSLContext)
            trust.load_cert_chain(files.certificate, files.private_key)
            trust.check_hostname = False
        return httpx.get(url, timeout=CALL_TIMEOUT_S, verify=trust).raise_for_status().text

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
        """Waits as :func:`testing.conditions.wait_until`. Its errors carry the end of the log as a note."""
        try:
            wait_until(condition, what, timeout_s)
        except AssertionError as error:
            error.add_note(self.log_tail)
            raise

    def is_ready(self) -> bool:
        """Returns whether all processes run and take requests, and the router uses all servers."""
        return bool(self.status().get("ready")) and uses_all_servers(self.url, self.trust())

    def is_idle(self) -> bool:
        """Returns whether there is no request, lease or transfer, and every block and slot is free."""
        return all(
            (s.num_waiting, s.num_running, s.leases_held, s.transfers_in_flight) == (0, 0, 0, 0)
            and (s.free_blocks, s.free_slots) == (s.num_blocks, s.num_slots)
            for s in self.stats().values()
        )

    def fault(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Gives servers this fault of :mod:`testing.fleets.injected` inside the block. The stack must come
        from :func:`slowed_stack`."""
        return switched_on(self.folder / FAULTS_FOLDER, name)

    def slow_steps(self) -> contextlib.AbstractContextManager[None]:
        """Makes decode servers rest for 100 ms before each step inside the block, so that their answers keep
        running on any machine. The stack must come from :func:`slowed_stack`."""
        return self.fault("slower-steps")

    def kill(self, name: str, signum: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to one child; returns the pid it had."""
        pid = self.processes()[name].pid
        os.kill(pid, signum)
        return pid

    def has_restarted(self, name: str, old_pid: int) -> bool:
        """Whether the child that had this pid was replaced by a new process, and the whole stack is ready."""
        process = self.processes().get(name)
        return process is not None and process.pid != old_pid and self.is_ready()

    def stop(self, timeout_s: float = STOP_DEADLINE_S) -> int:
        """Sends SIGTERM to the supervisor and returns its exit code. Fails if that takes too long or leaves a
        process behind."""
        children = [p.pid for p in self.processes().values()]
        code = super().stop(timeout_s)
        left = [pid for pid in children if psutil.pid_exists(pid)]
        assert not left, f"processes {left} outlived the supervisor\n{self.log_tail}"
        return code

    def kill_all(self) -> None:
        """Kills supervisor and children at once, for a stack that does not stop."""
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self.supervisor.pid).children(recursive=True)
            self.supervisor.kill()
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.supervisor.wait(STOP_DEADLINE_S)


def run_async(make: Callable[[], Any]) -> Any:
    """Runs a coroutine to its end; in a separate thread if a loop is already running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()


@contextlib.contextmanager
def running_stack(
    command: str,
    *flags: str,
    environment: dict[str, str] | None = None,
    module: str = "twinfang",
    deadline_s: float = START_DEADLINE_S,
) -> Iterator[Stack]:
    """Runs ``twinfang COMMAND FLAGS`` on a free port, and waits until it is ready and its router uses all
    servers. Stops it at the end of the block.

    An exception that leaves the block carries the end of the log as a note.
    """
    with tempfile.TemporaryDirectory(prefix="twinfang-") as folder:
        stack = start_stack(Path(folder), command, *flags, environment=environment, module=module)
        try:
            stack.wait_until_ready(deadline_s)
            stack.wait_until(stack.is_ready, "the router uses all servers")
            if tls_run.current is not None:
                tls_run.current.note(stack)
            yield stack
        except BaseException as error:
            error.add_note(f"--- log of twinfang {command} {' '.join(flags)}\n{stack.log_tail}")
            stack.kill_all()
            raise
        if stack.supervisor.poll() is None:
            stack.stop()


def slowed_stack(command: str, *flags: str) -> contextlib.AbstractContextManager[Stack]:
    """Does the same as :func:`running_stack`, but the decode servers can be slowed down
    (:meth:`Stack.slow_steps`)."""
    return running_stack(command, *flags, module=slowed.MODULE)


def start_stack(
    folder: Path,
    command: str,
    *flags: str,
    environment: dict[str, str] | None = None,
    module: str = "twinfang",
) -> Stack:
    """Starts a stack and does not wait. Steps that are launched ahead can't be sanitized, so stacks that
    launch ahead run without the sanitizer."""
    (folder / FAULTS_FOLDER).mkdir()
    environment = {FOLDER_VARIABLE: str(folder / FAULTS_FOLDER)} | (environment or {})
    if "--steps-ahead" in flags and flags[flags.index("--steps-ahead") + 1] == "1":
        environment = {"TWINFANG_SANITIZE": "0"} | environment
    if tls_run.current is not None and "--tls" not in flags:
        flags = (*flags, "--tls")
    with log_path(folder).open("wb") as log:
        arguments = stack_arguments(folder, command, *flags)
        return Stack(start_process(module, arguments, log=log, environment=environment), folder)


@contextlib.contextmanager
def running_router(*flags: str, deadline_s: float = START_DEADLINE_S) -> Iterator[str]:
    """Runs ``twinfang router FLAGS`` in front of running servers; yields its URL once it is ready and uses
    all of them."""
    (port,) = free_ports(1)
    url = f"http://{LOOPBACK}:{port}"
    router = subprocess.Popen([sys.executable, "-m", "twinfang", "router", *flags, "--port", str(port)])
    try:
        wait_until(
            lambda: router.poll() is not None or uses_all_servers(url),
            "the router uses all servers",
            deadline_s,
        )
        assert router.poll() is None, f"the router has ended with {router.poll()}"
        yield url
    finally:
        router.terminate()
        router.wait(STOP_DEADLINE_S)


class Stacks:
    """Stacks that tests share, by command and flags."""

    def __init__(self, exits: contextlib.ExitStack) -> None:
        self._exits = exits
        self._running: dict[tuple[str, ...], Stack] = {}

    def __call__(self, command: str, *flags: str, module: str = "twinfang") -> Stack:
        """Returns the running stack of these flags; starts it at the first call."""
        key = (module, command, *flags)
        if key not in self._running:
            self._running[key] = self._exits.enter_context(running_stack(command, *flags, module=module))
        stack = self._running[key]
        stack.used_by.add(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
        return stack

    def slowed(self, command: str, *flags: str) -> Stack:
        """Returns a stack whose servers can be slowed down (:meth:`Stack.slow_steps`)."""
        return self(command, *flags, module=slowed.MODULE)

    def logs_for(self, test_id: str) -> list[tuple[str, str]]:
        """Returns title and end of the log of each stack that a test used."""
        return [
            (f"log of {' '.join(key)}", stack.log_tail)
            for key, stack in self._running.items()
            if test_id in stack.used_by and stack.folder.exists()
        ]


_shared: list[Stacks] = []


@pytest.fixture(scope="package")
def stacks() -> Iterator[Stacks]:
    """``stacks("up", "--decode", "2")`` is a stack that the tests below this ``conftest.py`` share. It ends
    with them, because a stack that nobody asks still takes 1 % of a core."""
    with _sharing() as shared:
        yield shared


@pytest.fixture(scope="module")
def module_stacks() -> Iterator[Stacks]:
    """Like ``stacks``, for stacks of unusual flags, which end with the module's tests."""
    with _sharing() as shared:
        yield shared


@contextlib.contextmanager
def _sharing() -> Iterator[Stacks]:
    with contextlib.ExitStack() as exits:
        shared = Stacks(exits)
        _shared.append(shared)
        yield shared
        _shared.remove(shared)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds to a failed test's report the logs of the shared stacks it used."""
    report = yield
    if report.failed:
        for shared in _shared:
            report.sections += shared.logs_for(item.nodeid)
    return report
