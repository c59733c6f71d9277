"""A router that runs as the chart says follows pods through their life, as a real API server tells of it."""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest

from router.kubernetes.cluster import PAGE_SIZE
from testing.conditions import until
from testing.kubernetes.cloud import CPU_DEMO, VALUES
from testing.kubernetes.node import Node
from testing.kubernetes.release import Release

FOLLOWS_S = 1.0


async def test_a_router_finds_its_servers_and_serves(cloud):
    router = await cloud.start_router()
    await until(lambda: "no decode server is connected" in router.why_not_ready())
    prefill = await cloud.add("prefill-0", "prefill")
    pod = cloud.create("decode-0")
    decode = await cloud.serve(pod, "decode")
    await until(lambda: router.in_use() == {prefill.address})
    cloud.node.set_ready("decode-0", True)
    await until(lambda: not router.why_not_ready())
    assert await router.ask() == 200
    assert (len(prefill.requests), len(decode.submitted)) == (1, 1)
    assert {worker["added_by"] for worker in router.workers().values()} == {"discovery"}


async def test_a_router_follows_within_a_second(cloud, record_property):
    router = await cloud.start_router()
    took = {}

    async def followed(what, condition):
        began = time.monotonic()
        await until(condition)
        took.setdefault(what, []).append(time.monotonic() - began)

    for i in range(5):
        name = f"decode-{i}"
        server = await cloud.serve(cloud.create(name))
        address = {server.address}
        cloud.node.set_ready(name, True)
        await followed("ready", lambda address=address: router.in_use() == address)
        cloud.node.set_ready(name, False)
        await followed("unready", lambda: not router.in_use())
        cloud.node.set_ready(name, True)
        await followed("ready again", lambda address=address: router.in_use() == address)
        deleted = cloud.node.delete(name)
        assert deleted["metadata"]["deletionGracePeriodSeconds"] == 150, "as the chart says"
        await followed("deleted", lambda: not router.in_use())
        await until(lambda server=server: server.drains)
        assert router.workers()[server.address]["draining"]
        cloud.node.end(name)
        await followed("gone", lambda: not router.workers())
    for what, seconds in took.items():
        record_property(what, f"median {statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s")
        print(f"{what}: median {statistics.median(seconds):.3f} s, at most {max(seconds):.3f} s")
    assert statistics.median(second for seconds in took.values() for second in seconds) < FOLLOWS_S


async def test_a_pod_that_is_being_deleted_gets_no_request(cloud):
    router = await cloud.start_router()
    first, second = await cloud.add("a"), await cloud.add("b")
    await until(lambda: router.in_use() == {first.address, second.address})
    for _ in range(8):
        assert await router.ask() == 200
    assert first.submitted
    cloud.node.delete("a")
    await until(lambda: router.in_use() == {second.address})
    num_before = len(first.submitted)
    for _ in range(12):
        assert await router.ask() == 200
    assert len(first.submitted) == num_before
    assert first.drains


async def test_a_finalizer_holds_a_pod_that_has_ended_and_the_router_does_not_use_it(cloud):
    router = await cloud.start_router()
    server = await cloud.add("held", finalizers=("example.com/audit",))
    await until(lambda: router.in_use() == {server.address})
    cloud.node.delete("held")
    await until(lambda: not router.in_use())
    held = cloud.node.end("held")
    assert held["metadata"]["deletionGracePeriodSeconds"] == 0
    cloud.node.set_ready("held", False)
    cloud.node.set_ready("held", True)
    await until(lambda: router.metric("twinfang_discovery_pods", state="terminating") == 1)
    assert router.workers()[server.address]["draining"]
    assert await router.ask() == 503
    cloud.node.set_metadata("held", finalizers=None)
    await until(lambda: not router.workers())


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
async def test_a_pod_whose_containers_have_ended_is_gone(cloud, phase):
    router = await cloud.start_router()
    server = await cloud.add("a")
    await until(lambda: router.in_use() == {server.address})
    cloud.node.set_status("a", phase=phase)
    await until(lambda: not router.workers())
    cloud.node.delete("a")
    await until(lambda: router.metric("twinfang_discovery_events_total", event="deleted") == 1)


async def test_a_pod_made_anew_with_the_same_name_and_ip_is_another_server(cloud):
    router = await cloud.start_router()
    first = await cloud.add("a")
    await until(lambda: router.in_use() == {first.address})
    before = router.workers()[first.address]
    cloud.node.delete("a")
    await until(lambda: first.drains)
    await first.stop()
    cloud.node.end("a")
    second = await cloud.add("a", ip=first.host)
    await until(lambda: router.in_use() == {second.address})
    assert router.workers()[second.address]["incarnation"] != before["incarnation"]
    assert (await router.ask(), len(second.submitted), second.drains) == (200, 1, [])


async def test_a_pod_that_loses_its_label_is_let_go(cloud):
    router = await cloud.start_router()
    server = await cloud.add("a")
    await until(lambda: router.in_use() == {server.address})
    cloud.node.set_metadata("a", labels={"twinfang.io/role": None})
    await until(lambda: not router.workers())
    cloud.node.set_metadata("a", labels={"twinfang.io/role": "decode"})
    await until(lambda: router.in_use() == {server.address})


async def test_two_releases_see_their_own_pods_alone(cloud, make_namespace, tmp_path):
    """In one namespace, and in two."""
    server, admin = cloud.release.server, cloud.node.api
    beside = Release(server, cloud.release.namespace, tmp_path, name="other")
    elsewhere = Release(server, make_namespace(), tmp_path)
    for release in (beside, elsewhere):
        release.install(VALUES, CPU_DEMO)
    routers = [await cloud.start_router(release) for release in (cloud.release, beside, elsewhere)]
    addresses = []
    for release in (cloud.release, beside, elsewhere):
        node = Node(admin, release.namespace)
        pod = node.create(f"{release.prefix}-decode-default", f"{release.name}-pod")
        scripted = await cloud.serve(pod)
        node.set_ready(pod["metadata"]["name"], True)
        addresses.append(scripted.address)
    for router, address in zip(routers, addresses, strict=True):
        await until(lambda router=router, address=address: router.in_use() == {address})
        assert router.workers().keys() == {address}


async def test_more_pods_than_a_page_holds_are_all_found(cloud):
    num_pods = PAGE_SIZE + 1
    for i in range(num_pods):
        cloud.create(f"decode-{i}")
    server = await cloud.serve(cloud.create("the-last"))
    cloud.node.set_ready("the-last", True)
    router = await cloud.start_router()
    await until(lambda: router.in_use() == {server.address}, timeout_s=20)
    assert router.metric("twinfang_discovery_pods", state="not_ready") == num_pods


async def test_bookmarks_show_that_a_quiet_watch_is_alive(cloud, make_namespace, tmp_path):
    """The API server sends one a minute if pods have changed anywhere since the watch began."""
    router = await cloud.start_router()
    elsewhere = Release(cloud.release.server, make_namespace(), tmp_path)
    elsewhere.install(VALUES, CPU_DEMO)
    Node(cloud.node.api, elsewhere.namespace).create(f"{elsewhere.prefix}-decode-default", "a")
    async with asyncio.timeout(100):
        while not router.metric("twinfang_discovery_events_total", event="bookmark"):
            await asyncio.sleep(1)
    assert router.metric("twinfang_discovery_contact_age_seconds") < 10
    assert not any(map(router.relists, ("ended", "gone", "broken", "silent", "refused")))
    assert not router.workers()
