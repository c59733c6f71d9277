"""A prefill server, a decode server and routers that have only IPv6 addresses."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from testing.conditions import TIMEOUT_S, until, wait_until
from testing.fleets.fleet import START_DEADLINE_S
from testing.router.scripted_servers import ScriptedDecode, saying, server_info
from twinfang.flags.table import BUNDLED_MODEL
from twinfang.stack.ports import free_ports

LOOPBACK = "::1"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((LOOPBACK, 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")


@contextlib.contextmanager
def running(*commands: tuple[str, ...]) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-m", "twinfang", *command]) for command in commands]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        assert [process.wait(TIMEOUT_S) for process in processes] == [0] * len(processes)


def is_ok(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


async def is_ready(client: httpx.AsyncClient, url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await client.get(f"{url}/readyz")).status_code == 200
    return False


@pytest.mark.exhaustive
def test_state_is_handed_over():
    prefill, decode, router, router_metrics, decode_metrics = free_ports(5, LOOPBACK)
    model = ("--model", str(BUNDLED_MODEL), "--host", LOOPBACK)
    servers = ("--prefill", f"[{LOOPBACK}]:{prefill}", "--decode", f"[{LOOPBACK}]:{decode}")
    with running(
        ("prefill", *model, "--port", str(prefill), "--metrics-port", str(router_metrics)),
        ("decode", *model, "--port", str(decode), "--metrics-port", str(decode_metrics)),
        ("router", "--host", LOOPBACK, "--port", str(router), *servers),
    ):
        url = f"http://[{LOOPBACK}]:{router}"
        wait_until(lambda: is_ok(f"{url}/readyz"), "the router is ready", START_DEADLINE_S)
        body = {"prompt": "def fibonacci(n): return", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert answer.json()["usage"]["completion_tokens"] == 4
        page = httpx.get(f"http://[{LOOPBACK}]:{decode_metrics}/metrics").text
        (moved,) = [line for line in page.splitlines() if line.startswith("twinfang_transfer_bytes_total ")]
        assert float(moved.split()[1]) > 0


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_router_on_all_addresses_takes_clients_of_both_families(tmp_path: Path, workers: str):
    decode = ScriptedDecode(server_info("both"), host=LOOPBACK)
    decode.script = saying([50] * 4)
    await decode.start()
    (port,) = free_ports(1, "::")
    flags = ("--host", "::", "--port", str(port), "--workers", workers, "--decode", decode.address)
    with running(("router", *flags)):
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            for host in (f"[{LOOPBACK}]", "127.0.0.1"):
                await until(partial(is_ready, client, f"http://{host}:{port}"), "the router is ready")
                answer = await client.post(f"http://{host}:{port}/v1/completions", json={"prompt": "a"})
                assert answer.json()["usage"]["completion_tokens"] == 4
    await decode.stop()
