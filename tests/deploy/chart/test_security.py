"""Who may do what and reach whom, in what the chart renders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.deploy.helm import EXAMPLES, Manifest, container_of, of_kind, pod_makers, pod_of, render

NOBODY = {"kubernetes.io/metadata.name": "elsewhere"}
MONITORING = {"kubernetes.io/metadata.name": "monitoring"}
SERVER_PORTS = {"prefill": (8100, 18100), "decode": (8200, 18200)}
UCX_PORTS = (20000, 20999)
MEETING_PORT, ANY_PORT = 8290, 45678
"""Where ranks of one group meet, and one of those that they choose themselves."""

by_example = pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda e: e.stem if e else "defaults")


def manifests_of(example: Path | None) -> list[Manifest]:
    return render({}, *([example] if example else []))


def locks_memory(example: Path | None) -> bool:
    values = {} if example is None else yaml.safe_load(example.read_text(encoding="utf-8"))
    return bool(values.get("nixl", {}).get("ipcLock"))


@by_example
def test_pods_have_no_privileges_but_the_one_that_is_asked_for(example: Path | None) -> None:
    for name, deployment in pod_makers(manifests_of(example)).items():
        pod, container = pod_of(deployment), container_of(deployment)
        asked = name.startswith(("prefill", "decode")) and locks_memory(example)
        security: dict[str, Any] = pod["securityContext"] | container["securityContext"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if asked else {})
        assert (security["runAsNonRoot"], security["runAsUser"]) == ((False, 0) if asked else (True, 10001))
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


@by_example
def test_the_router_may_watch_pods_and_nothing_else_and_servers_have_no_token(example: Path | None) -> None:
    manifests = manifests_of(example)
    (role,) = of_kind(manifests, "Role").values()
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert not {"ClusterRole", "ClusterRoleBinding"} & {manifest["kind"] for manifest in manifests}
    (binding,) = of_kind(manifests, "RoleBinding").values()
    (subject,) = binding["subjects"]
    for name, deployment in pod_makers(manifests).items():
        is_router = name == "router"
        assert pod_of(deployment)["automountServiceAccountToken"] is is_router
        assert (pod_of(deployment)["serviceAccountName"] == subject["name"]) is is_router
    for account in of_kind(manifests, "ServiceAccount").values():
        assert account["automountServiceAccountToken"] is False


def test_servers_take_requests_from_routers_state_from_each_other_and_scrapes_from_monitoring() -> None:
    reach = Reach(render())
    for server, (grpc_port, metrics_port) in SERVER_PORTS.items():
        assert reach.ports("router", server) == {grpc_port}
        for peer in SERVER_PORTS:
            assert reach.ports(peer, server) == {grpc_port, *UCX_PORTS}
        assert reach.ports_from_namespace(NOBODY, server) == set()
        assert reach.ports_from_namespace(MONITORING, server) == {metrics_port}
        assert reach.ports(server, "router") == set(), "servers never call routers"


def test_ranks_of_a_group_reach_each_other_everywhere_and_others_at_their_state_alone() -> None:
    spread = {"tensorParallel": 4, "leaderWorkerSet": {"size": 2}}
    reach = Reach(render({"decodePools": {"default": spread}, "prefillPools": {"default": spread}}))
    for role, other in (("decode", "prefill"), ("prefill", "decode")):
        grpc_port, _ = SERVER_PORTS[role]
        for source, target in ((role, f"{role}-worker"), (f"{role}-worker", role)):
            assert {MEETING_PORT, ANY_PORT, *UCX_PORTS} <= reach.ports(source, target)
        for source in (other, f"{other}-worker"):
            assert reach.ports(source, role) == {grpc_port, *UCX_PORTS}
            assert set(UCX_PORTS) <= reach.ports(source, f"{role}-worker")
            assert not {MEETING_PORT, ANY_PORT} & reach.ports(source, f"{role}-worker")
        assert reach.ports("router", f"{role}-worker") == set()
        assert reach.ports_from_namespace(NOBODY, f"{role}-worker") == set()


def test_every_server_of_a_pod_is_reached_by_those_who_reach_its_first() -> None:
    reach = Reach(render({"decodePools": {"default": {"dataParallel": 3, "expertParallel": True}}}))
    grpc_ports, metrics_ports = {8200, 8201, 8202}, {18200, 18201, 18202}
    tried = {*grpc_ports, 8203, *metrics_ports, 18203, MEETING_PORT}
    assert reach.ports("router", "decode", tried) == grpc_ports
    assert reach.ports("prefill", "decode", tried) == grpc_ports
    assert reach.ports_from_namespace(MONITORING, "decode", tried) == metrics_ports


def test_the_planner_may_scale_the_two_deployments_and_reads_metrics() -> None:
    manifests = render({"autoscale": {"enabled": True, "apply": True}})
    role = of_kind(manifests, "Role")["autoscale"]
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["demo-twinfang-prefill-default", "demo-twinfang-decode-default"],
            "verbs": ["get", "patch"],
        }
    ]
    reach = Reach(manifests)
    assert reach.ports("autoscale", "router") == {8000}
    for server, (_, metrics_port) in SERVER_PORTS.items():
        assert reach.ports("autoscale", server) == {metrics_port}
        assert reach.ports(server, "autoscale") == set()
    said_alone = render({"autoscale": {"enabled": True}})
    assert set(of_kind(said_alone, "Role")) == {"router"}
    planner = of_kind(said_alone, "Deployment")["autoscale"]
    assert pod_of(planner)["automountServiceAccountToken"] is False


def test_whoever_may_send_requests_can_be_named() -> None:
    assert Reach(render()).ports_from_namespace(NOBODY, "router") == {8000}
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}]
    reach = Reach(render({"networkPolicy": {"clients": clients}}))
    assert reach.ports_from_namespace(NOBODY, "router") == set()
    assert reach.ports_from_namespace({"kubernetes.io/metadata.name": "gateway"}, "router") == {8000}
    assert reach.ports_from_namespace(MONITORING, "router") == {8000}


@pytest.mark.parametrize(
    ("endpoint", "port"), [("http://collector:4318", 4318), ("https://c.example/v1", 443), ("http://c", 80)]
)
def test_the_collector_of_traces_can_be_reached_by_those_who_send_any(endpoint: str, port: int) -> None:
    for values, found in (({"tracing": {"otlpEndpoint": endpoint}}, 1), ({}, 0)):
        policies = of_kind(render(values), "NetworkPolicy")
        for name in ("router", "server"):
            rules = policies[name]["spec"]["egress"]
            assert rules.count({"ports": [{"port": port}]}) == found


def test_keys_and_tokens_are_mounted_in_routers_alone() -> None:
    auth = {"apiKeys": {"existingSecret": "keys"}, "adminToken": {"digest": f"sha256:{'0' * 64}"}}
    manifests = render({"auth": auth})
    for name, deployment in of_kind(manifests, "Deployment").items():
        secrets = {v["secret"]["secretName"] for v in pod_of(deployment)["volumes"] if "secret" in v}
        assert secrets == ({"keys", "demo-twinfang-admin-token"} if name == "router" else set())
    assert set(of_kind(manifests, "Secret")) == {"admin-token"}


KEY_LINE = f"alice sha256:{'a' * 64} min_priority=1 requests_per_minute=60 tokens_per_month=1000000"


@pytest.mark.parametrize(
    ("store", "port"),
    [
        ({"url": "redis://redis:6380/0"}, 6380),
        ({"url": "rediss://redis.example"}, 6379),
        ({"existingSecret": "store", "port": 7000}, 7000),
        ({}, None),
    ],
)
def test_routers_alone_know_and_reach_the_store_of_limits(store: dict[str, Any], port: int | None) -> None:
    manifests = render({"auth": {"apiKeys": {"lines": [KEY_LINE]}, "limitStore": store}})
    for name, deployment in of_kind(manifests, "Deployment").items():
        container = container_of(deployment)
        flags = [one for one in container["args"] if one.startswith("--limit-store")]
        assert flags == ([f"--limit-store={store['url']}"] if name == "router" and "url" in store else [])
        secrets = [v["valueFrom"] for v in container["env"] if v["name"] == "TWINFANG_LIMIT_STORE"]
        wanted = {"secretKeyRef": {"name": "store", "key": "url"}}
        assert secrets == ([wanted] if name == "router" and "existingSecret" in store else [])
    policies = of_kind(manifests, "NetworkPolicy")
    for name in ("router", "server"):
        opened = [rule for rule in policies[name]["spec"]["egress"] if rule == {"ports": [{"port": port}]}]
        assert len(opened) == (name == "router" and port is not None)


class Reach:
    """What network policies let through, by labels and ports: both ends have to allow it."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self._policies = [policy["spec"] for policy in of_kind(manifests, "NetworkPolicy").values()]
        pods = [one["spec"]["template"] for one in pod_makers(manifests).values()]
        found = [pod["metadata"]["labels"] for pod in pods]
        self._labels = {labels["app.kubernetes.io/component"]: labels for labels in found}

    def ports(self, source: str, target: str, tried: Iterable[int] = ()) -> set[int]:
        """Of those ``tried``, or of the target's own and UCX's, between two components of the release."""
        out = self._allowed("egress", "to", self._labels[source], self._labels[target])
        into = self._allowed("ingress", "from", self._labels[target], self._labels[source])
        tried = tried or _usual(target)
        return _open(tried, out) & _open(tried, into)

    def ports_from_namespace(
        self, namespace: dict[str, str], target: str, tried: Iterable[int] = ()
    ) -> set[int]:
        allowed = self._allowed("ingress", "from", self._labels[target], {}, namespace)
        return _open(tried or _usual(target), allowed)

    def _allowed(
        self,
        direction: str,
        other_end: str,
        own: dict[str, str],
        other: dict[str, str],
        namespace: dict[str, str] | None = None,
    ) -> list[Manifest]:
        """Ports of the rules that hold for these two; a pod that no policy selects would be open to all."""
        policies = [policy for policy in self._policies if _selects(policy["podSelector"], own)]
        assert policies, f"no policy is for {own}"
        return [
            port
            for policy in policies
            for rule in policy[direction]
            if other_end not in rule or any(_is_peer(peer, other, namespace) for peer in rule[other_end])
            for port in rule.get("ports", [{"port": 1, "endPort": 65535}])
        ]


def _usual(target: str) -> set[int]:
    role = target.removesuffix("-worker")
    if role in SERVER_PORTS:
        return {*SERVER_PORTS[role], *UCX_PORTS, MEETING_PORT, ANY_PORT}
    return {8000, 18300}


def _open(tried: Iterable[int], allowed: list[Manifest]) -> set[int]:
    return {
        number
        for number in tried
        for port in allowed
        if port.get("protocol", "TCP") == "TCP"
        and port["port"] <= number <= port.get("endPort", port["port"])
    }


def _is_peer(peer: Manifest, labels: dict[str, str], namespace: dict[str, str] | None) -> bool:
    if "ipBlock" in peer:
        return False
    if "namespaceSelector" in peer:
        return namespace is not None and _selects(peer["namespaceSelector"], namespace)
    return namespace is None and _selects(peer["podSelector"], labels)


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        {"In": labels.get(one["key"]) in one["values"]}[one["operator"]]
        for one in selector.get("matchExpressions", [])
    )
