"""The HTTP port of a server for probes and metrics."""

import asyncio
import socket
import ssl
import time
from contextlib import closing

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from telemetry import server_telemetry
from telemetry.probe_port import ProbePort
from telemetry.server_telemetry import StatsReader
from testing.certificates import Authority
from testing.conditions import until
from testing.router.scripted_servers import server_stats
from wire.errors import ConfigError
from wire.tls.identity import Identity


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def state():
    return {"not_ready": "starting"}


@pytest.fixture
def port(registry, state):
    made = ProbePort("127.0.0.1", 0, registry, lambda: state["not_ready"])
    yield made
    made.close()


def test_healthz_is_503_while_something_hangs_and_the_log_says_what(registry, caplog):
    hang = None
    made = ProbePort("127.0.0.1", 0, registry, lambda: None, hang=lambda: hang)
    with closing(made), httpx.Client(base_url=f"http://127.0.0.1:{made.port}", timeout=10.0) as client:
        assert client.get("/healthz").status_code == 200
        hang = "the event loop hangs"
        answer = client.get("/healthz")
        assert (answer.status_code, answer.text) == (503, "the event loop hangs\n")
        told = [one.message for one in caplog.records if one.name == "telemetry.probe_port"]
        assert told == ["the event loop hangs; /healthz says so with status 503"]
        hang = None
        assert client.get("/healthz").status_code == 200


@pytest.fixture
def client(port):
    with httpx.Client(base_url=f"http://127.0.0.1:{port.port}", timeout=10.0) as made:
        yield made


def test_a_server_that_starts_is_alive_and_not_ready(client, state):
    assert client.get("/healthz").status_code == 200
    answer = client.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "starting\n")
    state["not_ready"] = None
    assert client.get("/readyz").status_code == 200


def test_metrics_are_shown_as_text_and_as_open_metrics(client, registry):
    Gauge("twinfang_something", "Something.", registry=registry).set(3)
    assert "twinfang_something 3.0" in client.get("/metrics").text.splitlines()
    answer = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_other_paths_and_methods_are_refused(client):
    assert client.get("/").status_code == 404
    assert client.post("/metrics").status_code == 405


def test_a_port_that_is_taken_is_named_with_the_flag(port, registry):
    with pytest.raises(ConfigError, match=f"--metrics-port {port.port}: .*choose another"):
        ProbePort("127.0.0.1", port.port, registry, lambda: None)


def test_a_client_that_sends_nothing_keeps_no_one_waiting(port, client):
    with socket.create_connection(("127.0.0.1", port.port)):
        assert client.get("/healthz").status_code == 200


async def test_an_engine_that_does_not_answer_leaves_the_figures_of_the_last_time(monkeypatch):
    hangs = False

    async def ask():
        if hangs:
            await asyncio.Event().wait()
        return server_stats(num_steps=7)

    read = StatsReader(ask, asyncio.get_running_loop())
    began_s = time.monotonic()
    first = await asyncio.to_thread(read)
    assert first.stats.num_steps == 7
    assert first.age_s <= time.monotonic() - began_s
    hangs = True
    monkeypatch.setattr(server_telemetry, "ANSWER_TIMEOUT_S", 0.05)
    later = await asyncio.to_thread(read)
    assert later.stats == first.stats
    assert later.age_s >= 0.05


def test_head_says_what_get_would_without_the_body(client, registry, state):
    Gauge("twinfang_something", "Something.", registry=registry).set(3)
    for path in ("/metrics", "/healthz", "/readyz", "/nothing"):
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"")
        for name in ("content-type", "content-length"):
            assert head.headers[name] == got.headers[name]


PATHS = ("/metrics", "/healthz", "/readyz", "/nothing")


def test_names_that_only_point_here_are_refused(client, registry):
    Gauge("twinfang_something", "Something.", registry=registry).set(3)
    for path in PATHS:
        for host in ("evil.example", "evil.example:18100", "localhost.evil.example", "10.0.0.1", ""):
            for method in ("GET", "HEAD", "POST"):
                answer = client.request(method, path, headers={"Host": host})
                assert answer.status_code == 403, (method, path, host)
                assert "twinfang_something" not in answer.text
    for host in ("localhost", "localhost:1", "a.localhost", "127.0.0.1:18100", "[::1]:18100"):
        assert client.get("/metrics", headers={"Host": host}).status_code == 200, host


def test_pages_of_other_sites_are_refused(client):
    for path in PATHS:
        for headers in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        ):
            assert client.get(path, headers=headers).status_code == 403, (path, headers)
    assert client.get("/metrics", headers={"Sec-Fetch-Site": "none"}).status_code == 200


def test_a_port_that_others_reach_goes_by_any_name(registry):
    """A scrape or a probe may come by the pod's address or by a service's name."""
    made = ProbePort("0.0.0.0", 0, registry, lambda: None)
    with closing(made), httpx.Client(base_url=f"http://127.0.0.1:{made.port}", timeout=10.0) as client:
        for host in ("10.0.3.4:18100", "prefill-0.pods.svc.cluster.local", ""):
            assert client.get("/metrics", headers={"Host": host}).status_code == 200
        assert client.get("/metrics", headers={"Origin": "https://evil.example"}).status_code == 403


def caller(files):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.authorities)
    context.load_cert_chain(files.certificate, files.private_key)
    return context


def scraped(port, context, session=None):
    """Return the first line that a caller gets for its metrics, and its TLS session."""
    called = socket.create_connection(("127.0.0.1", port), timeout=10.0)
    with context.wrap_socket(called, session=session) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        return connection.makefile("rb").readline(), connection.session


@pytest.fixture
def mutual(registry, tmp_path):
    """A port with mutual TLS, its authority, and its identity."""
    authority = Authority()
    identity = Identity(authority.identity(tmp_path, "server"), "server")
    made = ProbePort("127.0.0.1", 0, registry, lambda: None, identity=identity)
    yield made, authority, identity
    made.close()


@pytest.mark.parametrize("name", ["*.twinfang", "laptop.example.com", "router.twinfang.example.com"])
def test_a_certificate_without_a_role_shows_no_metrics(mutual, tmp_path, name):
    port, authority, _ = mutual
    good = authority.identity(tmp_path, "operator")
    assert b" 200 " in scraped(port.port, caller(good))[0]
    strange = authority.identity(tmp_path, "router", name=name)
    assert b" 403 " in scraped(port.port, caller(strange))[0]


async def test_no_ticket_outlives_an_authority_that_is_taken_away(mutual, tmp_path):
    """With a ticket of an earlier connection, OpenSSL would not look at the certificate again."""
    port, authority, identity = mutual
    operator = caller(authority.identity(tmp_path, "operator"))
    answer, session = await asyncio.to_thread(scraped, port.port, operator)
    assert b" 200 " in answer
    assert not session.has_ticket
    Authority().identity(tmp_path, "server")
    before, watching = identity.current, asyncio.create_task(identity.watch())
    await until(lambda: identity.current is not before, "the authority is gone")
    watching.cancel()
    with pytest.raises(OSError):
        await asyncio.to_thread(scraped, port.port, operator, session)
