"""The API server is gone, forgets versions, sends nonsense or is silent. The router keeps what it knew, and
is up to date soon after.
"""

import random
import re
import time

import pytest

from router.kubernetes.reflector import FIRST_PAUSE_S, JITTER
from testing.conditions import until
from testing.repository import DOCS
from testing.router.scripted_router import why_not_ready

DOCUMENT = DOCS / "metrics.md"


@pytest.fixture
async def cloud(make_cloud):
    """Two servers, each in its pod."""
    cloud = await make_cloud(num_decode=2, role="both")
    cloud.add("a", cloud.stack.decode[0])
    cloud.add("b", cloud.stack.decode[1])
    await until(lambda: len(cloud.in_use()) == 2 and cloud.api.num_watches)
    return cloud


async def relisted(cloud, cause):
    await until(lambda: cloud.pods.metrics.relists[cause] and cloud.api.num_watches)


async def test_what_is_deleted_while_the_api_is_away_is_missed_by_nobody(cloud):
    first, second = cloud.stack.decode
    await cloud.api.stop()
    await until(lambda: cloud.pods.metrics.relists["unreachable"])
    assert cloud.in_use() == {first.address, second.address}, "what is known stays"
    assert "can't be reached" in cloud.pods.problem
    cloud.api.end_pod("a")
    await cloud.api.start()
    await until(lambda: cloud.workers().keys() == {second.address})
    assert not cloud.pods.problem


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("break_watches", "broken"),
        ("end_watches", "ended"),
        ("say_gone", "gone"),
    ],
)
async def test_a_watch_that_ends_is_followed_by_a_list(cloud, fault, cause):
    getattr(cloud.api, fault)()
    cloud.api.compact()
    await relisted(cloud, cause)
    cloud.api.end_pod("a")
    await until(lambda: cloud.workers().keys() == {cloud.stack.decode[1].address})


@pytest.mark.parametrize("line", [b"not json\n", b"{}\n", b'{"type": "ADDED", "object": {}}\n', b"\x00" * 99])
async def test_garbage_in_the_watch_is_followed_by_a_list(cloud, line):
    cloud.api.say(line)
    cloud.api.say(None)
    cause = "garbage" if line.endswith(b"\n") else "broken"
    await relisted(cloud, cause)
    assert len(cloud.in_use()) == 2
    cloud.api.end_pod("a")
    await until(lambda: len(cloud.workers()) == 1)


@pytest.mark.parametrize("as_event", [True, False])
async def test_a_watch_from_a_version_that_is_gone_is_followed_by_a_list(cloud, as_event):
    cloud.api.gone_as_event = as_event
    num_lists = len([request for request in cloud.api.requests if request.verb == "list"])

    original = cloud.api._list

    def compact_behind(request):
        response = original(request)
        if cloud.pods.metrics.relists["gone"] < 2:
            cloud.api.compact()
        return response

    cloud.api._list = compact_behind
    cloud.api.break_watches()
    await until(lambda: cloud.pods.metrics.relists["gone"] == 2 and cloud.api.num_watches)
    assert len([request for request in cloud.api.requests if request.verb == "list"]) == num_lists + 3


async def test_pages_of_a_list_that_are_gone_are_followed_by_a_list(cloud):
    cloud.api.page_size = 1
    original = cloud.api._list

    def forget(request):
        response = original(request)
        if not cloud.pods.metrics.relists["gone"]:
            cloud.api.compact()
        return response

    cloud.api._list = forget
    cloud.api.break_watches()
    await relisted(cloud, "gone")
    assert len(cloud.in_use()) == 2


async def test_a_half_open_connection_is_noticed(make_cloud, deadlines):
    deadlines(silent_s=0.3, answer_s=0.3)
    cloud = await make_cloud(role="both")
    cloud.add("a", cloud.stack.decode[0])
    await until(lambda: cloud.in_use() and cloud.api.num_watches)
    cloud.api.is_silent = True
    cloud.api.end_pod("a")
    await until(lambda: cloud.pods.metrics.relists["silent"] >= 2)
    await until(lambda: "nothing came" in cloud.pods.problem or "longer than 0.3 s" in cloud.pods.problem)
    assert cloud.in_use(), "what is known stays"
    cloud.api.is_silent = False
    await until(lambda: not cloud.workers())


async def test_bookmarks_keep_a_quiet_watch_alive(make_cloud, deadlines, api):
    silent_s = 1.5
    deadlines(silent_s=silent_s)
    api._bookmark_interval_s = 0.05
    cloud = await make_cloud(role="both")
    await until(lambda: cloud.api.num_watches)
    began = time.monotonic()
    await until(lambda: time.monotonic() > began + 1.2 * silent_s)
    assert cloud.pods.metrics.events["bookmark"] > 2
    assert not cloud.pods.metrics.relists.total()
    assert await cloud.stack.metric("twinfang_discovery_contact_age_seconds") < silent_s


async def test_a_watch_ends_when_it_was_asked_to(make_cloud, deadlines):
    deadlines(watch_s=1.0)
    cloud = await make_cloud(role="both")
    await until(lambda: cloud.pods.metrics.relists["ended"])
    watches = [request.query for request in cloud.api.requests if request.verb == "watch"]
    assert watches[0]["timeoutSeconds"] == "1"
    assert (watches[0]["allowWatchBookmarks"], watches[0]["labelSelector"]) == ("True", "twinfang.io/role")


async def test_what_is_refused_is_said_with_its_remedy(cloud):
    cloud.api.forbidden = {"list"}
    cloud.api.break_watches()
    await until(lambda: cloud.pods.metrics.relists["refused"])
    assert "403" in cloud.pods.problem
    assert "RoleBinding" in cloud.pods.problem
    for name in ("a", "b"):
        cloud.api.end_pod(name)
    assert len(cloud.workers()) == 2
    cloud.api.forbidden = set()
    await until(lambda: not cloud.workers())


async def test_readiness_says_why_there_are_no_pods(make_cloud):
    cloud = await make_cloud(namespace="elsewhere", num_decode=0, num_prefill=0)
    await until(lambda: "403" in cloud.pods.problem)
    told = (await cloud.stack.client.get("/readyz")).json()["error"]["message"]
    assert "no decode server is ready" in told
    assert "elsewhere" not in told
    assert "no decode server is connected" in why_not_ready(cloud.stack)
    assert "'elsewhere'" in why_not_ready(cloud.stack)


NUM_FAILURES = 5
SHORTEST_S = (1 - JITTER) * sum(FIRST_PAUSE_S * 2**i for i in range(NUM_FAILURES - 1))
"""What the pauses in between come to at least: 1.1 s. Without them, some hundred requests a second."""


async def test_a_storm_of_410_is_met_with_longer_and_longer_pauses(cloud):
    cloud.api.watch_answer = 410
    began, before = time.monotonic(), len(cloud.api.requests)
    cloud.api.break_watches()
    await until(lambda: cloud.pods.metrics.relists["gone"] == NUM_FAILURES)
    assert time.monotonic() - began > SHORTEST_S
    assert len(cloud.api.requests) - before == 2 * NUM_FAILURES, "a list and a watch each"


async def test_refused_connections_are_met_with_longer_and_longer_pauses(cloud):
    began = time.monotonic()
    await cloud.api.stop()
    await until(lambda: cloud.pods.metrics.relists["unreachable"] == NUM_FAILURES)
    assert time.monotonic() - began > SHORTEST_S


async def test_metrics_tell_how_discovery_goes(cloud):
    cloud.api.create_pod("c", ready=False)
    cloud.api.create_pod("d", port="none")
    cloud.api.create_pod("e", model="large")
    cloud.api.delete_pod("a")
    cloud.api.say_bookmark()
    cloud.api.break_watches()
    await relisted(cloud, "broken")
    metric = cloud.stack.metric
    states = {
        state: await metric("twinfang_discovery_pods", state=state)
        for state in ("ready", "not_ready", "terminating", "unusable", "other_model")
    }
    assert states == dict.fromkeys(states, 1)
    assert await metric("twinfang_discovery_relists_total", cause="broken") == 1
    text = (await cloud.stack.client.get("/metrics")).text
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Discovery\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `(twinfang_\w+)", section, re.MULTILINE))
    assert set(re.findall(r"^(twinfang_discovery_\w+)", text, re.MULTILINE)) == documented


async def test_through_any_history_the_router_ends_where_the_pods_are(cloud):
    """A hundred things at random, faults among them."""
    rng, api = random.Random(7), cloud.api
    ports = [1, 2, 3, 4, 5]
    for i in range(100):
        names = api.pod_names
        what = rng.choice(["create", "create", "ready", "delete", "end", "phase", "fault"])
        if what == "create":
            api.create_pod(f"pod-{i}", port=rng.choice(ports), ready=rng.random() < 0.7)
        elif what == "fault":
            fault = rng.choice(["break_watches", "end_watches", "say_gone", "compact", "garbage", "away"])
            if fault == "away":
                await api.stop()
                api.create_pod(f"away-{i}", port=rng.choice(ports))
                await api.start()
            elif fault == "garbage":
                api.say(b"?\n")
            else:
                getattr(api, fault)()
        elif names:
            name = rng.choice(names)
            if what == "ready":
                api.set_ready(name, rng.random() < 0.5)
            elif what == "phase":
                api.set_status(name, phase="Failed")
            else:
                getattr(api, f"{what}_pod")(name)
        if rng.random() < 0.3:
            await until(lambda: not cloud.pods.problem)

    def wanted():
        live = [pod for pod in map(api.pod, api.pod_names) if pod["status"]["phase"] == "Running"]
        serving = [
            pod
            for pod in live
            if "deletionTimestamp" not in pod["metadata"]
            and pod["status"]["conditions"][1]["status"] == "True"
        ]
        return {f"127.0.0.1:{pod['metadata']['labels']['twinfang.io/port']}" for pod in serving}

    def taking():
        return {
            worker.address
            for worker in cloud.pool.workers()
            if not worker.drain.is_draining and "is not ready" not in worker.problem
        }

    await until(lambda: taking() == wanted())
