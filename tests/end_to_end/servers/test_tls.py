"""A stack with mutual TLS: it answers as one without, and nothing of ours can be read on its connections."""

from __future__ import annotations

import secrets
import socket
import ssl
import subprocess
import sys

import httpx
import psutil

from testing.conditions import until
from testing.fleets.capture import capturing
from testing.fleets.clients import all_at_once
from testing.fleets.stack import running_stack
from twinfang.stack.ports import LOOPBACK

SECRETS = (b"PrefillRequest", b"Submit", b"StepNews", b"HandshakeRe", b"ServerInfo", b"Hello", b"twinfang/")
"""Names in our messages, and the prefix of keys in a group's store."""


def bodies(secret):
    prompts = [f"{secret} " * 30 + f"number {i} is" for i in range(4)]
    return [{"prompt": prompt, "max_tokens": 12, "temperature": 0} for prompt in prompts]


def ports_of(stack):
    """The ports on which processes of the stack listen: those of ours, and those of UCX."""
    pids = [stack.supervisor.pid, *(process.pid for process in stack.processes().values())]
    listening = {
        one.laddr.port
        for pid in pids
        for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    urls = [process.metrics_url for process in stack.processes().values()]
    ours = {int(process.address.rpartition(":")[2]) for process in stack.processes().values()}
    ours |= {httpx.URL(url).port for url in urls if url}
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


async def test_a_stack_with_tls_answers_the_same_and_shows_nothing(stacks):
    plain = stacks("serve")

    with capturing() as capture, running_stack("up", "--tls") as stack:
        secret = secrets.token_hex(8)
        expected = [answer.token_ids for answer in await all_at_once(plain, bodies(secret))]
        found = [answer.token_ids for answer in await all_at_once(stack, bodies(secret))]
        assert found == expected
        assert stack.stats()["decode-0"].transfer_bytes > 0
        ours, others = ports_of(stack)
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
