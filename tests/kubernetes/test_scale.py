"""``twinfang autoscale --apply`` sets the sizes of the chart's pools, and needs one right for it."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from router.kubernetes.cluster_error import ClusterError
from tests.kubernetes.conftest import CPU_DEMO, VALUES
from tests.router.conftest import until
from tests.twinfang.autoscale.conftest import FakeRouter, FakeServer, pages  # noqa: F401
from twinfang.autoscale.scale_target import ScaleTarget

RULE = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get", "patch"]}
SCALED = {f"{role}Pools": {"default": {"autoscaling": {"enabled": True}}} for role in ("prefill", "decode")}
START_DEADLINE_S = 30.0


class Planner:
    """A service account of its own in a release's namespace, whose pools have one pod each."""

    def __init__(self, release, admin, folder):
        self.release = release
        self.kubeconfig = folder / "planner-kubeconfig"
        self._admin = admin
        release.install(VALUES | SCALED, CPU_DEMO)
        accounts = f"/api/v1/namespaces/{release.namespace}/serviceaccounts"
        admin.post(accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "planner"}})
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = admin.post(f"{accounts}/planner/token", asked)["status"]["token"]
        kubeconfig = json.loads(release.server.kubeconfig(self.kubeconfig).read_text())
        kubeconfig["users"][0]["user"] = {"token": token}
        self.kubeconfig.write_text(json.dumps(kubeconfig))

    def allow(self):
        namespace, group = self.release.namespace, "rbac.authorization.k8s.io"
        path = f"/apis/{group}/v1/namespaces/{namespace}"
        named = {"apiVersion": f"{group}/v1", "metadata": {"name": "planner"}}
        self._admin.post(f"{path}/roles", named | {"kind": "Role", "rules": [RULE]})
        subject = {"kind": "ServiceAccount", "name": "planner", "namespace": namespace}
        role = {"apiGroup": group, "kind": "Role", "name": "planner"}
        self._admin.post(
            f"{path}/rolebindings", named | {"kind": "RoleBinding", "roleRef": role, "subjects": [subject]}
        )

    def name(self, role):
        return f"{self.release.prefix}-{role}-default"

    def deployment(self, role):
        return self._admin.get(self._path(role))

    def scale(self, role, replicas):
        self._admin.patch(f"{self._path(role)}/scale", {"spec": {"replicas": replicas}})

    def _path(self, role):
        return f"/apis/apps/v1/namespaces/{self.release.namespace}/deployments/{self.name(role)}"

    def sizes(self):
        return tuple(self.deployment(role)["spec"]["replicas"] for role in ("prefill", "decode"))

    def target(self, role):
        return ScaleTarget(self.release.namespace, self.name(role), self.kubeconfig)


@pytest.fixture
def planner(release, admin, tmp_path):
    return Planner(release, admin, tmp_path)


@pytest.fixture
async def start(planner, pages):  # noqa: F811
    """Starts the command with further flags; gives its lines as they come."""
    processes = []

    async def run(*flags):
        server = FakeServer(pages)
        command = [sys.executable, "-m", "twinfang", "autoscale", *flags]
        command += ["--interval", "0.2", "--window", "1", "--router-metrics", FakeRouter(pages).url]
        command += ["--kubernetes-namespace", planner.release.namespace]
        command += ["--kubeconfig", str(planner.kubeconfig)]
        for role in ("prefill", "decode"):
            command += [f"--{role}-metrics", server.url, f"--{role}-deployment", planner.name(role)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        lines = []
        processes.append((process, asyncio.create_task(read(process, lines))))
        return lines

    async def read(process, lines):
        async for line in process.stdout:
            lines.append(line.decode())

    yield run
    for process, reading in processes:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), START_DEADLINE_S) == 0
        await reading


async def test_pools_are_given_the_sizes_that_it_says_and_are_otherwise_left_alone(planner, start):
    planner.allow()
    templates = [planner.deployment(role)["spec"]["template"] for role in ("prefill", "decode")]
    await start("--apply", "--min-prefill", "3", "--min-decode", "4")
    await until(lambda: planner.sizes() == (3, 4), timeout_s=START_DEADLINE_S)
    assert [planner.deployment(role)["spec"]["template"] for role in ("prefill", "decode")] == templates
    planner.release.install(VALUES | SCALED | {"image": {"tag": "2.0.0"}}, CPU_DEMO)
    assert planner.sizes() == (3, 4), "an upgrade takes nothing back"


async def test_without_apply_nothing_is_changed(planner, start):
    planner.allow()
    lines = await start("--min-prefill", "3")
    await until(lambda: any("prefill 1 -> 3 (dry run)" in line for line in lines), timeout_s=START_DEADLINE_S)
    assert planner.sizes() == (1, 1)


async def test_what_it_may_not_do_is_said_until_it_may(planner, start):
    lines = await start("--apply", "--min-prefill", "3")
    await until(
        lambda: any("prefill stays: the API server answers 403" in line for line in lines),
        timeout_s=START_DEADLINE_S,
    )
    assert planner.sizes() == (1, 1)
    planner.allow()
    await until(lambda: planner.sizes() == (3, 1))


async def test_a_size_that_somebody_has_changed_meanwhile_is_left_alone(planner):
    planner.allow()
    target = planner.target("decode")
    seen = await target.read()
    planner.scale("decode", 5)
    with pytest.raises(ClusterError, match="409"):
        await target.change(seen, 2)
    now = await target.read()
    assert now.replicas == 5
    assert (await target.change(now, 0)).replicas == 0
    assert (await target.read()).replicas == 0
