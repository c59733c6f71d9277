"""The chart's ``twinfang autoscale`` sizes its pools with the one right that the chart gives it."""

from __future__ import annotations

import json

import pytest

from router.kubernetes.cluster_error import ClusterError
from testing.autoscale.metrics_pages import FakeRouter, FakeServer
from testing.conditions import until
from testing.kubernetes.api import RefusedError
from testing.kubernetes.cloud import CPU_DEMO, VALUES
from testing.kubernetes.node import Node
from testing.kubernetes.pod_process import PodProcess
from twinfang.autoscale.scale_target import ScaleTarget

FLAGS = {"interval": 0.2, "window": 1, "min-prefill": 3, "min-decode": 4}
APPLYING = VALUES | {"autoscale": {"enabled": True, "apply": True, "flags": FLAGS}}
SAYING = VALUES | {"autoscale": {"enabled": True, "flags": FLAGS}}
START_DEADLINE_S = 30.0


class Planner:
    """The planner's pod in a release of the CPU demo, and figures of one server a role for it to read."""

    def __init__(self, release, admin, folder, pages, values):
        self.release = release
        self._admin = admin
        release.install(values, CPU_DEMO)
        node = Node(admin, release.namespace)
        self.pod = node.create(f"{release.prefix}-autoscale", "planner")
        self.token = node.token_of(self.pod)
        server, router = FakeServer(pages), FakeRouter(pages)
        (container,) = self.pod["spec"]["containers"]
        instead = {"router": router.url, "prefill": server.url, "decode": server.url}
        container["args"] = [reading(argument, instead) for argument in container["args"]]
        self.run = PodProcess(node, release.server, self.pod, folder / "planner")

    @property
    def said(self):
        return self.run.process.log.read_text()

    def name(self, role):
        return f"{self.release.prefix}-{role}-default"

    def deployment(self, role):
        return self._admin.get(self.path(self.name(role)))

    def scale(self, role, replicas):
        self._admin.patch(f"{self.path(self.name(role))}/scale", {"spec": {"replicas": replicas}})

    def path(self, deployment):
        return f"/apis/apps/v1/namespaces/{self.release.namespace}/deployments/{deployment}"

    def sizes(self):
        return tuple(self.deployment(role)["spec"]["replicas"] for role in ("prefill", "decode"))


def reading(argument, urls):
    """Without a cluster's name server, the addresses of metrics pages that tests have."""
    for role, url in urls.items():
        if argument.startswith(f"--{role}-metrics="):
            return f"--{role}-metrics={url}"
    return argument


@pytest.fixture
def make_planner(release, admin, tmp_path, pages):
    made = []

    def make(values=APPLYING):
        made.append(Planner(release, admin, tmp_path, pages, values))
        return made[-1]

    yield make
    for planner in made:
        planner.run.process.stop()


async def test_pools_are_given_the_sizes_that_it_says_and_are_otherwise_left_alone(make_planner):
    planner = make_planner()
    templates = [planner.deployment(role)["spec"]["template"] for role in ("prefill", "decode")]
    planner.run.process.start()
    await until(lambda: planner.sizes() == (3, 4), timeout_s=START_DEADLINE_S)
    assert [planner.deployment(role)["spec"]["template"] for role in ("prefill", "decode")] == templates
    planner.release.install(APPLYING | {"image": {"tag": "2.0.0"}}, CPU_DEMO)
    assert planner.sizes() == (3, 4), "an upgrade takes nothing back"


async def test_without_apply_it_has_no_token_and_nothing_is_changed(make_planner):
    planner = make_planner(SAYING)
    assert not planner.run.has_token
    planner.run.process.start()
    await until(lambda: "prefill 1 -> 3 (dry run)" in planner.said, timeout_s=START_DEADLINE_S)
    assert planner.sizes() == (2, 2), "the demo's own"


async def test_what_it_may_not_do_is_said_until_it_may(make_planner, admin):
    planner = make_planner()
    group, namespace = "rbac.authorization.k8s.io", planner.release.namespace
    admin.delete(f"/apis/{group}/v1/namespaces/{namespace}/rolebindings/{planner.release.prefix}-autoscale")
    before = planner.sizes()
    planner.run.process.start()
    await until(
        lambda: "prefill stays: the API server answers 403" in planner.said, timeout_s=START_DEADLINE_S
    )
    assert planner.sizes() == before
    planner.release.install(APPLYING, CPU_DEMO)
    await until(lambda: planner.sizes() == (3, 4))


async def test_it_may_read_and_patch_the_scales_of_the_two_pools_alone(make_planner, plane):
    planner = make_planner()
    pool, router = (planner.path(planner.name("prefill")), planner.path(f"{planner.release.prefix}-router"))
    pods = f"/api/v1/namespaces/{planner.release.namespace}/pods"
    with plane.first.as_user(planner.token) as api:
        assert api.get(f"{pool}/scale")["spec"]["replicas"] == 1
        for method, path in (
            ("GET", pool),
            ("PATCH", pool),
            ("DELETE", pool),
            ("PUT", f"{pool}/scale"),
            ("GET", f"{router}/scale"),
            ("PATCH", f"{router}/scale"),
            ("GET", pods),
        ):
            with pytest.raises(RefusedError) as refusal:
                api.call(method, path, None if method in ("GET", "DELETE") else {})
            assert refusal.value.status == 403, (method, path)


async def test_a_size_that_somebody_has_changed_meanwhile_is_left_alone(make_planner, tmp_path):
    planner = make_planner()
    kubeconfig = planner.release.server.kubeconfig(tmp_path / "planner-kubeconfig")
    access = json.loads(kubeconfig.read_text())
    access["users"][0]["user"] = {"token": planner.token}
    kubeconfig.write_text(json.dumps(access))
    target = ScaleTarget(planner.release.namespace, planner.name("decode"), kubeconfig)
    seen = await target.read()
    planner.scale("decode", 5)
    with pytest.raises(ClusterError, match="409"):
        await target.change(seen, 2)
    now = await target.read()
    assert now.replicas == 5
    assert (await target.change(now, 0)).replicas == 0
    assert (await target.read()).replicas == 0
