"""A pod of several ranks is ready when all are, whatever port its kubelet looks at."""

import http.client
import socket
from contextlib import ExitStack, closing

import pytest
from prometheus_client import CollectorRegistry

from telemetry.probe_port import ProbePort
from twinfang.stack import rank_probes
from twinfang.stack.ports import free_ports
from twinfang.stack.rank_probes import probing
from wire.errors import ConfigError


def asked(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    return answer.status, said


@pytest.fixture
def ranks():
    """Why each is not ready, which a test may change, and where they say it."""
    reasons = {"decode-0": "the model is loaded", "decode-1": None}
    with ExitStack() as stack:
        ports = {}
        for name in reasons:
            port = ProbePort("127.0.0.1", 0, CollectorRegistry(), lambda name=name: reasons[name])
            stack.callback(port.close)
            ports[name] = f"http://127.0.0.1:{port.port}"
        yield reasons, ports


def test_all_are_ready_when_each_is(ranks):
    reasons, ports = ranks
    with probing("127.0.0.1", 0, ports) as probes:
        assert asked(probes.port, "/readyz") == (503, "decode-0: the model is loaded\n")
        reasons["decode-0"] = None
        assert asked(probes.port, "/readyz") == (200, "ready\n")
        reasons["decode-1"] = "it drains"
        assert asked(probes.port, "/readyz") == (503, "decode-1: it drains\n")
        assert asked(probes.port, "/healthz") == (200, "ok\n")


def test_one_that_is_not_there_or_frozen_is_not_ready(ranks, monkeypatch):
    reasons, ports = ranks
    reasons["decode-0"] = None
    monkeypatch.setattr(rank_probes, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, probing("127.0.0.1", 0, ports) as probes:
        ports["decode-2"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert asked(probes.port, "/readyz")[0] == 503
        ports["decode-2"] = f"http://127.0.0.1:{free_ports(1)[0]}"
        status, said = asked(probes.port, "/readyz")
        assert (
            status,
            f"decode-2 does not answer at {ports['decode-2'].removeprefix('http://')}" in said,
        ) == (503, True)


def test_a_rank_that_hangs_or_is_frozen_fails_liveness_and_one_that_starts_again_does_not(monkeypatch):
    hung, gone = "the engine hangs: a step has lasted for 600 s", f"http://127.0.0.1:{free_ports(1)[0]}"
    rank = ProbePort("127.0.0.1", 0, CollectorRegistry(), lambda: "starting", hang=lambda: hung)
    monkeypatch.setattr(rank_probes, "ANSWER_S", 0.1)
    ports = {"decode-0": gone}
    with (
        closing(rank),
        socket.create_server(("127.0.0.1", 0)) as frozen,
        probing("127.0.0.1", 0, ports) as probes,
    ):
        assert asked(probes.port, "/healthz") == (200, "ok\n")
        ports["decode-1"] = f"http://127.0.0.1:{rank.port}"
        assert asked(probes.port, "/healthz") == (503, f"decode-1: {hung}\n")
        ports["decode-1"] = f"http://127.0.0.1:{frozen.getsockname()[1]}"
        status, said = asked(probes.port, "/healthz")
        assert (status, said.startswith("decode-1 does not answer at")) == (503, True)


def test_a_port_that_is_taken_is_named_by_its_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"--probe-port {port}: can't listen"),
            probing("127.0.0.1", port, {}),
        ):
            pass
