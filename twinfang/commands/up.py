"""Runs a stack in the foreground and reports its progress: ``twinfang up`` and ``twinfang serve``. Plans the
stack that ``twinfang batch`` starts for itself."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from router.config import RouterConfig
from router.resources import Files
from twinfang.commands.servers import router_config
from twinfang.flags.flag import FlagGroup, add_flags, resolve
from twinfang.forking.client import ForkServer
from twinfang.stack.child import Child
from twinfang.stack.own_stack import OwnStack
from twinfang.stack.ports import LOOPBACK, ports_held
from twinfang.stack.stack import Stack, plan_stack, stack_environment
from twinfang.stack.supervisor import Supervisor

EXAMPLE_PROMPT = "def fibonacci(n):"


def prepare(
    values: argparse.Namespace,
    roles: Mapping[str, int],
    router_groups: Sequence[FlagGroup],
    forks: ForkServer | None,
) -> Callable[[], None]:
    """Plans a stack with the given number of servers of each role. Returns a function that runs it until
    Ctrl-C or SIGTERM. ``forks`` starts its servers, and is closed at the end."""
    stack = plan_stack(values, roles)
    if forks is not None:
        task = [server.arguments for server in stack.servers]
        forks.prepare(task, num_forks=len(stack.servers), timeout_s=values.start_timeout)
    config = router_config(router_values(stack.router.arguments, router_groups))
    return partial(_run, stack, values, config, forks)


def own_stack(values: argparse.Namespace, router_groups: Sequence[FlagGroup]) -> OwnStack:
    """Plans a stack for a command's own work: prefill and decode servers if their numbers are given, else one
    server of both roles. Its router listens on a free loopback port."""
    values.host, values.port, values.metrics_port, values.tls = LOOPBACK, 0, None, False
    roles = {"both": 1}
    if values.prefill or values.decode:
        roles = {"prefill": values.prefill or 1, "decode": values.decode or 1}
    stack = plan_stack(values, roles)
    config = router_config(router_values(stack.router.arguments, router_groups))
    num_decoding = sum(count for role, count in roles.items() if role != "prefill")
    servers = ", ".join(server.name for server in stack.servers)
    return OwnStack(
        stack,
        values.device,
        values.start_timeout,
        num_decoding * values.data_parallel_size * values.max_num_seqs,
        (stack.model_name, *(alias.name for alias in values.alias)),
        f"{servers} and a router for model {stack.model_name} ({values.model})",
        lambda: Files.read(config).close(),
    )


def _run(stack: Stack, values: argparse.Namespace, router: RouterConfig, forks: ForkServer | None) -> None:
    try:
        Files.read(router).close()  # an error here is found before servers start; the router starts last
        _say(f"model {stack.model_name} ({values.model}), CPU threads per server: {stack.num_threads}")
        asyncio.run(_supervise(stack, values, forks))
    finally:
        if forks is not None:
            forks.close()
        if stack.authority is not None:
            stack.authority.remove()
        if values.status_file is not None:
            values.status_file.unlink(missing_ok=True)
    _say("stopped")


async def _supervise(stack: Stack, values: argparse.Namespace, forks: ForkServer | None) -> None:
    progress = Progress(stack, values.status_file, values.admin_token_file)
    supervisor = Supervisor(
        [stack.servers, (stack.router,)],
        environment=stack_environment(os.environ, values.device, values),
        start_timeout_s=values.start_timeout,
        on_change=lambda child: progress.report(child, supervisor),
        forks=forks,
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signum, _stop, supervisor, values.shutdown_grace)
    with ports_held(stack.addresses):
        await supervisor.run()


def _stop(supervisor: Supervisor, grace_s: float) -> None:
    """Stops the stack, the more quickly the more often it is called, and says so."""
    if supervisor.is_stopping:
        _say("\nending what still runs")
    else:
        _say(f"\nstopping: running answers have up to {grace_s:g} s; Ctrl-C again ends them at once")
    supervisor.request_stop()


def router_values(arguments: Sequence[str], groups: Sequence[FlagGroup]) -> argparse.Namespace:
    """Returns the flag values of a router's command line, whose first word is the command."""
    parser = argparse.ArgumentParser()
    add_flags(parser, groups)
    return resolve(groups, parser.parse_args(arguments[1:]), {})


class Progress:
    """Reports progress to the terminal and to the status file."""

    def __init__(self, stack: Stack, status_file: Path | None, admin_token_file: Path | None) -> None:
        self._stack = stack
        self._admin_token_file = admin_token_file
        self._status_file = status_file
        self._started = time.monotonic()
        self._announced = False

    def report(self, child: Child, supervisor: Supervisor) -> None:
        if child.is_ready:
            after = "" if child.num_restarts else f" after {time.monotonic() - self._started:.1f} s"
            again = f" again (restart {child.num_restarts})" if child.num_restarts else ""
            _say(f"{child.name:<12} ready{again}{after}  {child.spec.address}  pid {child.pid}")
        if supervisor.is_ready and not self._announced:
            self._announced = True
            _say(_invitation(self._stack, self._admin_token_file))
        if self._announced and self._status_file is not None:
            _write_atomically(self._status_file, _status(self._stack, supervisor))


def _invitation(stack: Stack, admin_token_file: Path | None) -> str:
    body = {"model": stack.model_name, "prompt": EXAMPLE_PROMPT, "max_tokens": 64, "stream": True}
    curl = f"curl -N{_trust(stack)}"
    return (
        f"\nServing {stack.model_name} at {stack.url}. Try\n\n"
        f"  {curl} {stack.url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(json.dumps(body))}\n\n"
        f"{_pages(stack, admin_token_file)}\n\n"
        "Ctrl-C stops everything."
    )


def _trust(stack: Stack) -> str:
    """Returns curl's option for the router's certificate, which may not be for the address by which this
    machine reaches the router."""
    if stack.authority is not None:
        return f" --cacert {stack.authority.ca}"
    return " -k" if stack.scheme == "https" else ""


def _pages(stack: Stack, admin_token_file: Path | None) -> str:
    """Returns the lines that list the metrics pages and the dashboard."""
    pages = {child.name: child.metrics_url for child in (stack.router, *stack.servers)}
    lines = [f"  metrics    {url}  {name}" for name, url in pages.items() if url is not None]
    if stack.authority is not None:
        files = stack.authority.files("operator")
        lines.append(
            f"             servers show theirs to curl --cacert {files.authorities} -k --cert "
            f"{files.certificate} --key {files.private_key}"
        )
    if admin_token_file is not None:
        lines.append(f"  dashboard  {stack.url}/admin/ui  asks for the token in {admin_token_file}")
    else:
        lines.append("  dashboard  with --admin-token-file FILE; make one with `openssl rand -hex 32 > FILE`")
    return "\n".join(lines)


def _status(stack: Stack, supervisor: Supervisor) -> dict[str, object]:
    return {
        "url": stack.url,
        "model": stack.model_name,
        "pid": os.getpid(),
        "ready": supervisor.is_ready,
        "tls_folder": None if stack.authority is None else str(stack.authority.folder),
        "processes": [
            {
                "name": child.name,
                "address": child.spec.address,
                "pid": child.pid,
                "ready": child.is_ready,
                "metrics_url": child.spec.metrics_url,
                "restarts": child.num_restarts,
            }
            for child in supervisor.children
        ],
    }


def _write_atomically(path: Path, content: dict[str, object]) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _say(line: str) -> None:
    print(line, flush=True)
