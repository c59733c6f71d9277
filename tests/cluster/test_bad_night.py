"""A release lives through one night after another, in this order, and its clients see nothing of it.

Each test needs those before it: they are one story of one release.
"""

from __future__ import annotations

import itertools
import re
import ssl
from pathlib import Path

import httpx
import pytest

from testing.certificates import Authority
from testing.cluster.cluster import FIRST_TAG, SECOND_TAG
from testing.cluster.load import Load
from testing.cluster.machine import kill_processes_of
from testing.cluster.release import HelmRelease, is_ready
from testing.conditions import wait_until
from testing.kubernetes.api import Manifest
from testing.kubernetes.cloud import CPU_DEMO

ROLES = ("prefill", "decode", "router")
DRAIN_DEADLINE_S = 900.0
RESTART_DEADLINE_S = 600.0
NUM_REQUESTS = 12
ANSWERS_DEADLINE_S = 240.0
SECRET_DEADLINE_S = 300.0
"""A kubelet brings a changed secret to its pods within two minutes."""
SERVER_NAME = "llm.example.com"
HTTPS: Manifest = {
    "tls": {"secretName": "router-tls", "serverName": SERVER_NAME, "caKey": "ca.crt"},
    "service": {"port": 443},
}

pytestmark = pytest.mark.timeout(3600)


def values(*, size: int, tag: str = FIRST_TAG, router: Manifest | None = None) -> Manifest:
    """The demo on CPUs, with the planner as soon as there is more than one of each."""
    found: Manifest = {
        "image": {"tag": tag},
        "routerImage": {"tag": tag},
        "poolDefaults": {"replicas": 1, "drainSeconds": 60, "resources": {"limits": {"cpu": "2"}}},
        "router": {
            "replicas": size,
            "preStopSeconds": 5,
            "shutdownGraceSeconds": 60,
            # On a starved machine, a role's only server has been silent for longer than 15 s, the default.
            "flags": {"hold-s": 60},
        }
        | (router or {}),
    }
    if size > 1:
        flags = {f"{bound}-{role}": size for bound in ("min", "max") for role in ("prefill", "decode")}
        found["autoscale"] = {"enabled": True, "apply": True, "flags": {"interval": 2, "window": 10} | flags}
    return found


def num_ready(release: HelmRelease) -> dict[str, int]:
    return {role: len(release.ready(role)) for role in ROLES}


def image_tags(release: HelmRelease) -> set[str]:
    return {
        container["image"].rpartition(":")[2]
        for pod in release.pods()
        for container in pod["spec"]["containers"]
    }


@pytest.fixture(autouse=True)
def _the_story_so_far(request: pytest.FixtureRequest) -> None:
    if request.session.testsfailed:
        pytest.skip("a test before it has failed")


def test_a_release_of_one_pod_each_answers_through_its_service(release: HelmRelease, load: Load) -> None:
    release.upgrade(values(size=1), CPU_DEMO)
    release.wait_until_rolled_out()
    assert num_ready(release) == dict.fromkeys(ROLES, 1)
    with load.during("nothing: one prefill, one decode server, one router") as clients:
        wait_until(lambda: clients.num_answers >= NUM_REQUESTS, "answers", ANSWERS_DEADLINE_S)
    assert load.rows[-1].errors == []


def test_an_upgrade_replaces_all_pods(release: HelmRelease, load: Load) -> None:
    with load.during("`helm upgrade` to another image: all pods are replaced"):
        release.upgrade(values(size=1, tag=SECOND_TAG), CPU_DEMO)
        release.wait_until_rolled_out()
    assert image_tags(release) == {SECOND_TAG}
    assert load.rows[-1].errors == []


def test_a_rollback_takes_it_back(release: HelmRelease, load: Load) -> None:
    with load.during("`helm rollback`: all pods are replaced"):
        release.rollback()
        release.wait_until_rolled_out()
    assert image_tags(release) == {FIRST_TAG}
    assert load.rows[-1].errors == []


def test_the_planner_doubles_both_pools(release: HelmRelease, load: Load) -> None:
    with load.during("`twinfang autoscale` scales both pools from 1 to 2; a second router"):
        release.upgrade(values(size=2), CPU_DEMO)
        wait_until(
            lambda: num_ready(release) == dict.fromkeys(ROLES, 2) and release.is_rolled_out(),
            "two of each are ready",
            DRAIN_DEADLINE_S,
            interval_s=0.5,
        )
    assert load.rows[-1].errors == []


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_server_that_is_killed_costs_no_request(release: HelmRelease, load: Load, role: str) -> None:
    pod, *_ = release.ready(role)

    def is_back(now: Manifest) -> bool:
        statuses = now["status"].get("containerStatuses", [])
        return is_ready(now) and all(status["restartCount"] > 0 for status in statuses)

    with load.during(f"SIGKILL to all processes of a {role} pod; its kubelet starts it again") as clients:
        wait_until(lambda: clients.num_answers > 0, "answers", ANSWERS_DEADLINE_S)
        assert kill_processes_of(pod["metadata"]["uid"]) > 1
        wait_until(
            lambda: any(is_back(now) for now in release.pods(role) if same(now, pod)),
            f"{pod['metadata']['name']} is back",
            RESTART_DEADLINE_S,
            interval_s=0.5,
        )
    assert load.rows[-1].errors == []


def same(one: Manifest, other: Manifest) -> bool:
    return bool(one["metadata"]["uid"] == other["metadata"]["uid"])


def test_a_node_is_drained(release: HelmRelease, load: Load) -> None:
    before = {pod["metadata"]["name"] for pod in release.pods() if pod["spec"]["nodeName"] == "node-b"}
    assert before, "all pods are on the other node"
    drain = ("drain", "node-b", "--delete-emptydir-data", f"--timeout={DRAIN_DEADLINE_S:.0f}s")
    with load.during(f"`kubectl drain` of a node with {len(before)} pods, and uncordon"):
        release.release.kubectl(*drain, timeout_s=DRAIN_DEADLINE_S)
        release.wait_until_rolled_out()
        assert {pod["spec"]["nodeName"] for pod in release.pods()} == {"node-a"}
        release.release.kubectl("uncordon", "node-b")
    assert load.rows[-1].errors == []


def test_routers_turn_to_https_and_their_certificate_is_replaced(
    release: HelmRelease, load: Load, tmp_path: Path
) -> None:
    """Clients know the certificate by the Service's address, the planner by the chart's ``serverName``."""
    authority = Authority()
    root = authority.write_root(tmp_path)

    def issue() -> str:
        files = authority.write(tmp_path, SERVER_NAME, release.service_address())
        found = {"tls.crt": files.certificate, "tls.key": files.private_key, "ca.crt": root}
        release.put_secret("router-tls", found)
        return first_certificate(files.certificate)

    issue()
    release.upgrade(values(size=2, router=HTTPS), CPU_DEMO)
    release.wait_until_rolled_out()
    load.trust = authority.client()
    with load.during("HTTPS on both routers; another certificate in their secret"):
        (planner,) = release.ready("autoscale")
        ages: list[dict[str, float]] = []

        def plans() -> bool:
            """From the start on, the ages of a planner that can't read routers do nothing but grow."""
            ages.append(plan_ages(planner))
            return all(
                any(now[role] < before[role] for before, now in itertools.pairwise(ages))
                for role in ("prefill", "decode")
            )

        wait_until(plans, "the planner knows the load", ANSWERS_DEADLINE_S, interval_s=0.5)
        renewed = issue()
        wait_until(
            lambda: all(served_certificate(pod) == renewed for pod in release.ready("router")),
            "all routers have the new certificate",
            SECRET_DEADLINE_S,
            interval_s=0.5,
        )
    assert load.rows[-1].errors == []


def plan_ages(planner: Manifest) -> dict[str, float]:
    """Returns how long ago each pool was planned from its load, in seconds."""
    page = httpx.get(f"http://{planner['status']['podIP']}:18300/metrics").text
    found = re.findall(r'^twinfang_autoscale_plan_age_seconds{role="(\w+)"} (\S+)$', page, re.MULTILINE)
    return {role: float(age) for role, age in found}


def first_certificate(path: Path) -> str:
    text = path.read_text()
    return text[: text.index(ssl.PEM_FOOTER)].strip()


def served_certificate(pod: Manifest) -> str:
    text = ssl.get_server_certificate((pod["status"]["podIP"], 8000), timeout=ANSWERS_DEADLINE_S)
    return text[: text.index(ssl.PEM_FOOTER)].strip()
