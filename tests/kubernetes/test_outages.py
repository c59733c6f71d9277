"""API servers go away, etcd forgets, rights are taken: what is known stays, and is right soon after."""

from __future__ import annotations

import asyncio
import signal

import pytest

from router.config import PodDiscovery
from router.kubernetes.cluster import Deadlines
from router.kubernetes.metrics import DiscoveryMetrics
from router.kubernetes.reflector import Reflector
from testing.conditions import until
from testing.kubernetes.node import Node

RETURNS_S = 10.0
"""Docs say that a router notices an API server's return within 7 s."""


@pytest.fixture
def second(plane):
    """An API server that is there whatever happens to the routers' own, which is well again afterwards."""
    if not plane.second.process.is_running:
        plane.second.start()
        plane.second.wait_until_ready()
    with plane.second.as_admin() as api:
        yield api
    plane.link.mend()
    if plane.first.process.is_running:
        plane.first.process.stop()
    plane.first.start()
    plane.first.wait_until_ready()


async def with_two_servers(cloud):
    first, second = await cloud.add("a"), await cloud.add("b")
    router = await cloud.start_router()
    await until(lambda: router.in_use() == {first.address, second.address})
    return router, first, second


async def returns(plane):
    plane.first.start()
    await until(plane.first.is_ready, timeout_s=60)


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_pod_deleted_while_the_api_server_is_away_is_not_missed(plane, second, cloud, end):
    router, a, b = await with_two_servers(cloud)
    getattr(plane.first.process, end)()
    await until(lambda: router.relists("unreachable"))
    node = Node(second, cloud.release.namespace)
    node.delete("a")
    node.end("a")
    assert router.in_use() == {a.address, b.address}, "what is known stays"
    assert await router.ask() == 200
    await returns(plane)
    await until(lambda: router.workers().keys() == {b.address}, timeout_s=RETURNS_S)
    assert not router.why_not_ready()


async def test_a_pod_that_is_being_deleted_when_the_api_server_returns_is_drained(plane, second, cloud):
    router, a, b = await with_two_servers(cloud)
    plane.first.process.stop()
    Node(second, cloud.release.namespace).delete("a")
    await returns(plane)
    await until(lambda: router.in_use() == {b.address}, timeout_s=RETURNS_S)
    await until(lambda: a.drains)


@pytest.mark.parametrize(("caches_pods", "cause"), [(False, "gone"), (True, "ended")])
async def test_versions_that_etcd_has_compacted_away_are_got_over(plane, second, cloud, caches_pods, cause):
    """What an API server has missed is forgotten when it asks: 410 for it, and for who watches through it."""
    plane.first.process.stop()
    plane.first.start(caches_pods=caches_pods)
    await until(plane.first.is_ready, timeout_s=60)
    router, a, b = await with_two_servers(cloud)
    plane.link.cut()
    node = Node(second, cloud.release.namespace)
    node.delete("a")
    node.end("a")
    node.set_metadata("b", annotations={"example.com/touched": "yes"})
    plane.etcd.compact()
    assert router.in_use() == {a.address, b.address}
    plane.link.mend()
    await until(lambda: router.workers().keys() == {b.address}, timeout_s=60)
    assert router.relists(cause)
    assert not router.why_not_ready()
    cloud.node.set_ready("b", False)
    await until(lambda: not router.in_use())


async def test_a_compaction_is_nothing_to_a_watch_that_is_up_to_date(plane, cloud):
    router, a, b = await with_two_servers(cloud)
    for i in range(20):
        cloud.node.set_metadata("a", annotations={"example.com/number": str(i)})
    plane.etcd.compact()
    cloud.node.set_ready("a", False)
    await until(lambda: router.in_use() == {b.address})
    assert router.workers().keys() == {a.address, b.address}
    assert not any(map(router.relists, ("ended", "gone", "broken")))


async def test_a_router_that_was_frozen_while_pods_came_and_went_catches_up(plane, cloud):
    router, _, b = await with_two_servers(cloud)
    router.process.signal(signal.SIGSTOP)
    cloud.node.delete("a")
    cloud.node.end("a")
    third = await cloud.add("c")
    for i in range(2000):
        cloud.node.set_metadata("b", annotations={"example.com/number": str(i)})
    plane.etcd.compact()
    router.process.signal(signal.SIGCONT)
    await until(lambda: router.in_use() == {b.address, third.address}, timeout_s=RETURNS_S)
    assert router.workers().keys() == {b.address, third.address}


async def test_a_router_starts_while_the_api_server_is_away(plane, second, cloud):
    server = await cloud.add("a")
    plane.first.process.stop()
    cloud.node = Node(second, cloud.release.namespace)
    router = await cloud.start_router()
    await until(lambda: "can't be reached" in router.why_not_ready())
    await returns(plane)
    await until(lambda: router.in_use() == {server.address}, timeout_s=RETURNS_S)
    assert await router.ask() == 200


async def test_a_right_that_is_taken_away_is_missed_by_name_until_it_is_given_again(plane, second, cloud):
    router, a, b = await with_two_servers(cloud)
    name, namespace = f"{cloud.release.prefix}-router", cloud.release.namespace
    binding = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings/{name}"
    taken = second.get(binding)
    second.delete(binding)
    plane.first.process.stop()
    await returns(plane)
    await until(lambda: router.relists("refused"), timeout_s=RETURNS_S)
    for server in (a, b):
        await server.stop()
    await until(lambda: "answers 403" in router.why_not_ready())
    said = router.why_not_ready()
    assert f"system:serviceaccount:{namespace}:{name}" in said
    assert "RoleBinding" in said
    assert router.workers().keys() == {a.address, b.address}
    metadata = {key: taken["metadata"][key] for key in ("name", "namespace", "labels")}
    second.post(binding.rpartition("/")[0], taken | {"metadata": metadata})
    for server in (a, b):
        await server.start()
    await until(lambda: not router.why_not_ready(), timeout_s=RETURNS_S)


async def test_a_token_that_is_good_no_longer_is_replaced_without_a_restart(plane, second, cloud):
    """Tokens end with their pod object, or with their service account."""
    router, a, b = await with_two_servers(cloud)
    name = router.pod["metadata"]["name"]
    cloud.node.end(name)
    plane.first.process.stop()
    await returns(plane)
    await until(lambda: router.relists("refused"), timeout_s=RETURNS_S)
    assert router.in_use() == {a.address, b.address}
    router.pod = cloud.node.create(f"{cloud.release.prefix}-router", name)
    router.renew_token()
    cloud.node.delete("a")
    await until(lambda: router.in_use() == {b.address}, timeout_s=RETURNS_S)


class Names:
    """Of the pods that a reflector has told of, none forgotten."""

    def __init__(self):
        self.seen = set()

    def listed(self, pods):
        self.seen |= {pod["metadata"]["name"] for pod in pods}

    def changed(self, event):
        self.seen.add(event.object["metadata"]["name"])


async def test_a_watch_on_which_nothing_comes_is_begun_anew(plane, second, cloud, tmp_path):
    """API servers of 1.20 send no bookmark after their start until they have seen some pod change."""
    plane.first.process.stop()
    await returns(plane)
    kubeconfig = plane.first.kubeconfig(tmp_path / "kubeconfig")
    pods = PodDiscovery(cloud.release.namespace, kubeconfig=kubeconfig)
    figures, names = DiscoveryMetrics(), Names()
    watching = asyncio.create_task(Reflector(pods, names, figures, deadlines=Deadlines(silent_s=1.0)).run())
    try:
        await until(lambda: figures.relists["silent"] >= 2, timeout_s=20)
        assert set(+figures.relists) == {"silent"}
        cloud.create("late")
        await until(lambda: "late" in names.seen, timeout_s=20)
    finally:
        watching.cancel()
