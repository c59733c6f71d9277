"""A stack with mutual TLS: it answers as one without, and nothing of ours can be read on its connections."""

from __future__ import annotations

import os
import secrets
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack

import httpx
import psutil
import pytest

from testing.conditions import until, wait_until
from testing.fleets.capture import capturing
from testing.fleets.clients import all_at_once
from testing.fleets.fleet import START_DEADLINE_S, Process
from testing.fleets.stack import running_stack
from testing.fleets.tls_run import SECRETS, ports_of
from twinfang.own_authority import OwnAuthority
from twinfang.stack.ports import LOOPBACK, free_ports


def bodies(secret):
    prompts = [f"{secret} " * 30 + f"number {i} is" for i in range(4)]
    return [{"prompt": prompt, "max_tokens": 12, "temperature": 0} for prompt in prompts]


def all_ports_of(stack):
    """The ports on which processes of the stack listen: those of ours, and those of UCX."""
    pids = [stack.supervisor.pid, *(process.pid for process in stack.processes().values())]
    listening = {
        one.laddr.port
        for pid in pids
        for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    ours = ports_of(stack)
    return ours, listening - ours


def version_refused(port, files, version):
    """Whether TLS of this version is refused, as for a caller who has a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.maximum_version = False, version
    context.load_verify_locations(files.authorities)
    context.load_cert_chain(files.certificate, files.private_key)
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((LOOPBACK, port)) as plain, context.wrap_socket(plain):
            return False
    except OSError:
        return True


@pytest.mark.in_clear  # it tries calls in clear
async def test_a_stack_with_tls_answers_the_same_and_shows_nothing(stacks):
    plain = stacks("serve")

    with capturing() as capture, running_stack("up", "--tls") as stack:
        secret = secrets.token_hex(8)
        expected = [answer.token_ids for answer in await all_at_once(plain, bodies(secret))]
        found = [answer.token_ids for answer in await all_at_once(stack, bodies(secret))]
        assert found == expected
        assert stack.stats()["decode-0"].transfer_bytes > 0
        ours, others = all_ports_of(stack)
        router = int(stack.url.rpartition(":")[2])
        servers = [one for one in stack.processes().values() if one.name != "router"]
        ports = {int(one.address.rpartition(":")[2]) for one in servers}
        await until(
            lambda: {ends[1] for ends in capture.to_ports(ours)} >= ports | {router}, "every hop was seen"
        )
        mine, nixl = capture.to_ports(ours), capture.to_ports(others)
        assert [ends for ends, one in mine.items() if not one.is_tls] == []
        for ends, one in (mine | nixl).items():
            assert not [text for text in (secret.encode(), *SECRETS) if one.has(text)], ends
        print(f"{len(mine)} connections of ours, {len(nixl)} of NIXL's")
        files = stack.authority.files("router")
        for port in ports:
            assert version_refused(port, files, ssl.TLSVersion.TLSv1_2)
            assert not version_refused(port, files, ssl.TLSVersion.TLSv1_3)
        check_metrics(servers, stack.authority)
        check_drain(servers[0], stack.authority)


def check_metrics(servers, authority):
    """Metrics are for callers with a certificate; the probes are for all."""
    files = authority.files("operator")
    trust = ssl.create_default_context(cafile=str(authority.ca))
    trust.check_hostname = False
    known = ssl.create_default_context(cafile=str(authority.ca))
    known.check_hostname = False
    known.load_cert_chain(files.certificate, files.private_key)
    for server in servers:
        assert httpx.get(server.metrics_url, verify=trust).status_code == 403
        assert httpx.get(server.metrics_url.replace("metrics", "readyz"), verify=trust).status_code == 200
        assert "twinfang_tls_certificate_expiry" in httpx.get(server.metrics_url, verify=known).text


def check_drain(server, authority):
    command = [sys.executable, "-m", "twinfang", "drain", server.address]
    refused = subprocess.run(
        [*command, *authority.arguments("server")], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2, refused.stderr
    assert "that of a operator has to have 'operator.twinfang'" in refused.stderr
    clear = subprocess.run(command, capture_output=True, text=True, check=False)
    assert clear.returncode == 1, clear.stderr
    assert clear.stderr.count("\n") == 1, clear.stderr


@pytest.mark.exhaustive
def test_ranks_on_two_hosts_meet_and_talk_by_tls(tmp_path):
    """Only gloo's tensors are in clear, as the documentation says."""
    authority = OwnAuthority.make(LOOPBACK)
    store, first, second, router = free_ports(4)
    spread = ("--tensor-parallel", "2", "--nnodes", "2", "--dist-init-addr", f"{LOOPBACK}:{store}")
    own = ("--role", "both", "--metrics-port", "off", "--threads", "1", *authority.arguments("server"))
    with capturing() as capture, ExitStack() as exits:
        lifeline = os.pipe()
        exits.callback(os.close, lifeline[0])
        exits.callback(os.close, lifeline[1])
        exits.callback(authority.remove)
        processes = [
            Process(
                "host-0", ("decode", *spread, "--node-rank", "0", "--port", str(first), *own), first, tmp_path
            ),
            Process(
                "host-1",
                ("decode", *spread, "--node-rank", "1", "--port", str(second), *own),
                second,
                tmp_path,
            ),
            Process(
                "router",
                (
                    "router",
                    "--decode",
                    f"{LOOPBACK}:{first}",
                    "--port",
                    str(router),
                    *authority.arguments("router"),
                ),
                router,
                tmp_path,
            ),
        ]
        for process in processes:
            process.start(lifeline[0])
            exits.callback(process.kill)
        trust = ssl.create_default_context(cafile=str(authority.ca))
        url = f"https://{LOOPBACK}:{router}"
        wait_until(lambda: is_ready(url, trust, processes), "the router is ready", START_DEADLINE_S)
        secret = secrets.token_hex(8)
        answer = httpx.post(f"{url}/v1/completions", json=bodies(secret)[0], verify=trust, timeout=60)
        assert answer.status_code == 200
        mine = ports_in_use(processes)
        wait_until(lambda: router in {ends[1] for ends in capture.connections}, "the capture has come so far")
        begun = {ends: one for ends, one in capture.connections.copy().items() if one.called or one.answered}
        seen = {ends: one for ends, one in begun.items() if set(ends) & mine}
        assert [
            ends for ends, one in seen.items() if ends[1] in (store, first, router) and not one.is_tls
        ] == []
        links = {ends for ends, one in seen.items() if one.is_tls and ends[1] not in (store, first, router)}
        assert len(links) >= 2, "rank 0's link to rank 1, and the mesh"
        needles = (secret.encode(), *SECRETS, b"tensor-parallel rank")
        for ends, one in seen.items():
            assert not [text for text in needles if one.has(text)], ends


def is_ready(url, trust, processes):
    for process in processes:
        assert process.is_alive, process.log[-2000:]
    try:
        return httpx.get(f"{url}/readyz", verify=trust).status_code == 200
    except httpx.HTTPError:
        return False


def ports_in_use(processes):
    """All local ports of the processes and of those that they have started."""
    found = set()
    for process in processes:
        root = psutil.Process(process.handle.pid)
        for one in (root, *root.children(recursive=True)):
            found |= {connection.laddr.port for connection in one.net_connections("tcp")}
    return found
