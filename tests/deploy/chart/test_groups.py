"""Pools whose servers span pods, or share one: what the chart gives LeaderWorkerSet, routers and kubelets."""

from __future__ import annotations

import copy
import subprocess
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from router.config import ROLE_LABEL
from router.kubernetes.pod import MODEL_LABEL, PORT_LABEL, NoServer, PodServer, offer_of
from testing.deploy.helm import (
    EXAMPLES,
    KUBERNETES_VERSIONS,
    Manifest,
    Parse,
    container_of,
    of_kind,
    pod_makers,
    pod_of,
    render,
)
from testing.deploy.leader_worker_sets import pods_of, validate_group
from twinfang.stack.rank_group import plan_ranks
from twinfang.stack.rank_place import RankPlace

BOX: Manifest = {"dataParallel": 4, "expertParallel": True, "tensorParallel": 2}
"""Four ranks of two GPUs each, in one pod."""
RACK: Manifest = {"dataParallel": 16, "expertParallel": True, "leaderWorkerSet": {"size": 2}}
"""Sixteen ranks in two pods."""
SPREAD: Manifest = {"tensorParallel": 16, "leaderWorkerSet": {"size": 2}}
"""One server in two pods."""


def rendered(pool: Manifest, **values: Any) -> list[Manifest]:
    return render({"decodePools": {"default": pool}} | values)


def group_of(manifests: list[Manifest]) -> Manifest:
    return of_kind(manifests, "LeaderWorkerSet")["decode-default"]


def gpus_of(maker: Manifest) -> int:
    return int(container_of(maker)["resources"]["limits"]["nvidia.com/gpu"])


def port_numbers(maker: Manifest, name: str) -> list[int]:
    """Of all of a pod's ports called so."""
    ports = container_of(maker).get("ports", [])
    return [port["containerPort"] for port in ports if port["name"].partition("-")[0] == name]


def labels_of(maker: Manifest) -> dict[str, str]:
    labels: dict[str, str] = maker["spec"]["template"]["metadata"]["labels"]
    return labels


def servers_of(maker: Manifest) -> list[str]:
    """Addresses that a router would use of a pod that has IP 10.0.0.7."""
    conditions = [{"type": "Ready", "status": "True"}]
    metadata = {"name": "a", "uid": "u", "labels": labels_of(maker)}
    status = {"podIP": "10.0.0.7", "phase": "Running", "conditions": conditions}
    offer = offer_of({"metadata": metadata, "status": status}, frozenset({"bundled_model"}))
    return [] if isinstance(offer, NoServer) else [_ready(server) for server in offer]


def _ready(server: PodServer) -> str:
    assert (server.role, server.is_ready) == ("decode", True)
    return server.address


def drained_by(maker: Manifest, parse: Parse, **variables: str) -> list[str]:
    """What its preStop hook drains, in a shell where it names one."""
    words = container_of(maker)["lifecycle"]["preStop"]["exec"]["command"]
    if words[0] == "sh":
        words = [*words[:-1], words[-1].replace("exec twinfang", "printf '%s\\n' twinfang")]
        told = subprocess.run(words, env=variables | {"PATH": "/bin"}, capture_output=True, check=True)
        words = told.stdout.decode().splitlines()
    assert words[0] == "twinfang"
    given = parse(words[1:])
    assert given.timeout == pod_of(maker)["terminationGracePeriodSeconds"] - 30
    return [address for several in given.server for address in several]


# --- what the API takes ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_leader_worker_sets_of_every_example_are_valid(version: str) -> None:
    found = 0
    for example in EXAMPLES:
        if "leaderWorkerSet" not in example.read_text(encoding="utf-8"):
            continue
        manifests = render({}, example, kube_version=version)
        for group in of_kind(manifests, "LeaderWorkerSet").values():
            validate_group(group, version)
            found += 1
    assert found == 3


@pytest.mark.parametrize("pool", [RACK, SPREAD], ids=["rack", "spread"])
def test_the_validator_knows_what_is_wrong(pool: Manifest) -> None:
    group = group_of(rendered(pool))
    validate_group(group, "1.34")
    for spoil in (
        lambda spec: spec.update(replica=3),
        lambda spec: spec["leaderWorkerTemplate"].update(restartPolicy="Always"),
        lambda spec: spec["rolloutStrategy"].update(type="Recreate"),
        lambda spec: spec["leaderWorkerTemplate"].pop("workerTemplate"),
    ):
        spoilt = copy.deepcopy(group)
        spoil(spoilt["spec"])
        with pytest.raises(jsonschema.ValidationError):
            validate_group(spoilt, "1.34")
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["gracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError, match="gracePeriod"):
        validate_group(group, "1.34")


def test_a_group_starts_together_ends_together_and_is_replaced_as_the_values_say() -> None:
    strategy = {"rollingUpdate": {"maxSurge": 2, "maxUnavailable": "25%"}}
    spread = SPREAD | {"strategy": strategy, "replicas": 3}
    spread["leaderWorkerSet"] = {"size": 2, "exclusiveTopology": "example.com/rack"}
    group = group_of(rendered(spread))
    assert group["metadata"]["annotations"] == {
        "leaderworkerset.sigs.k8s.io/exclusive-topology": "example.com/rack"
    }
    spec = group["spec"]
    assert (spec["replicas"], spec["startupPolicy"]) == (3, "LeaderCreated")
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == strategy["rollingUpdate"]
    template = spec["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    assert "annotations" not in group_of(rendered(SPREAD))["metadata"]
    assert "leaderTemplate" not in group_of(rendered(RACK))["spec"]["leaderWorkerTemplate"]


# --- one server in several pods --------------------------------------------------------------------


def test_pods_of_one_server_run_the_same_and_its_leader_alone_is_seen(parse: Parse) -> None:
    manifests = rendered(SPREAD | {"drainSeconds": 77})
    leader, worker = (pod_makers(manifests)[name] for name in ("decode-default", "decode-default-worker"))
    arguments = container_of(leader)["args"]
    assert arguments == container_of(worker)["args"]
    assert {"--tensor-parallel=16", "--nnodes=2"} <= set(arguments)
    assert (gpus_of(leader), gpus_of(worker)) == (8, 8)
    assert servers_of(leader) == ["10.0.0.7:8200"]
    assert not {ROLE_LABEL, MODEL_LABEL, PORT_LABEL} & set(labels_of(worker))
    assert "grpc" in container_of(leader)["readinessProbe"]
    assert {name for name in container_of(worker) if name.endswith("Probe") or name == "ports"} == set()
    services = of_kind(manifests, "Service").values()
    chosen = [one["spec"]["selector"].items() <= labels_of(worker).items() for one in services]
    assert not any(chosen), "nobody looks for metrics there"


def test_whichever_pod_of_one_server_is_deleted_its_server_drains_first(parse: Parse) -> None:
    makers = pod_makers(rendered(SPREAD | {"drainSeconds": 77}))
    leader, worker = makers["decode-default"], makers["decode-default-worker"]
    assert drained_by(leader, parse) == ["127.0.0.1:8200"]
    assert drained_by(worker, parse, LWS_LEADER_ADDRESS="d-0.d.llm") == ["d-0.d.llm:8200"]
    graces = {pod_of(one)["terminationGracePeriodSeconds"] for one in (leader, worker)}
    assert graces == {77 + 30}


def test_a_prefill_server_may_be_in_several_pods_too() -> None:
    makers = pod_makers(render({"prefillPools": {"default": SPREAD}}))
    leader, worker = makers["prefill-default"], makers["prefill-default-worker"]
    assert labels_of(leader)[ROLE_LABEL] == "prefill"
    assert labels_of(worker)["app.kubernetes.io/component"] == "prefill-worker"


# --- several servers in a pod ----------------------------------------------------------------------


def test_ranks_of_a_pod_are_servers_on_the_ports_that_the_chart_names(parse: Parse) -> None:
    manifests = rendered(BOX)
    assert not of_kind(manifests, "LeaderWorkerSet")
    maker = of_kind(manifests, "Deployment")["decode-default"]
    values = parse(container_of(maker)["args"])
    assert (values.enable_expert_parallel, values.tensor_parallel) == (True, 2)
    ranks = plan_ranks(values, RankPlace.find(values, {}))
    ports = [int(rank.address.rpartition(":")[2]) for rank in ranks]
    assert port_numbers(maker, "grpc") == ports == [8200, 8201, 8202, 8203]
    assert servers_of(maker) == [f"10.0.0.7:{port}" for port in ports]
    assert port_numbers(maker, "metrics") == [18200, 18201, 18202, 18203]
    assert all(
        f":{port}/" in str(rank.metrics_url) for port, rank in zip(range(18200, 18204), ranks, strict=True)
    )
    assert gpus_of(maker) == 8
    assert drained_by(maker, parse) == [f"127.0.0.1:{port}" for port in ports]


def test_a_pod_of_several_servers_is_ready_when_all_are(parse: Parse) -> None:
    container = container_of(of_kind(rendered(BOX), "Deployment")["decode-default"])
    numbers = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe, path in (
        ("startupProbe", "/readyz"),
        ("readinessProbe", "/readyz"),
        ("livenessProbe", "/healthz"),
    ):
        asked = container[probe]["httpGet"]
        assert (asked["path"], numbers[asked["port"]]) == (path, parse(container["args"]).probe_port)


def test_ranks_of_a_group_are_all_there_once_and_meet_at_their_leader(parse: Parse) -> None:
    manifests = rendered(RACK)
    maker = pod_makers(manifests)["decode-default"]
    values = parse(container_of(maker)["args"])
    ranks, addresses = [], set()
    for name, template, variables in pods_of(group_of(manifests)):
        place = RankPlace.find(values, variables)
        ranks += range(place.first, place.first + place.count)
        addresses.add(place.address)
        assert template["metadata"]["labels"][PORT_LABEL] == "8200-8207", name
    assert ranks == list(range(16))
    (address,) = addresses
    leader, port = address.rsplit(":", 1)
    assert leader == "demo-twinfang-decode-default-0.demo-twinfang-decode-default.llm"
    assert port_numbers(maker, "meeting") == [int(port)]
    assert gpus_of(maker) == 8


def test_no_pod_of_a_group_goes_before_all_of_its_servers_are_idle(parse: Parse) -> None:
    manifests = rendered(RACK | {"leaderWorkerSet": {"size": 4}})
    pods = pods_of(group_of(manifests))
    hosts = [f"{name}.demo-twinfang-decode-default.llm" for name, _, _ in pods]
    every = [f"{host}:{port}" for host in hosts for port in range(8200, 8204)]
    for _, template, variables in pods:
        assert drained_by({"spec": {"template": template}}, parse, **variables) == every


def test_a_group_with_one_rank_a_pod_is_made_of_plain_servers(parse: Parse) -> None:
    maker = pod_makers(rendered(RACK | {"leaderWorkerSet": {"size": 16}}))["decode-default"]
    assert servers_of(maker) == ["10.0.0.7:8200"]
    assert "grpc" in container_of(maker)["readinessProbe"]
    assert parse(container_of(maker)["args"]).probe_port == 0
    assert (gpus_of(maker), port_numbers(maker, "meeting")) == (1, [8290])


# --- around them -----------------------------------------------------------------------------------


def test_every_server_of_a_pod_is_scraped_and_told_apart() -> None:
    pools = {"decodePools": {"default": BOX, "small": {}}}
    manifests = render(pools | {"monitoring": {"serviceMonitor": {"enabled": True}}})
    (service,) = (one for name, one in of_kind(manifests, "Service").items() if name == "decode")
    offered = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    monitors = of_kind(manifests, "ServiceMonitor")
    endpoints = monitors["decode"]["spec"]["endpoints"]
    assert [offered[endpoint["port"]] for endpoint in endpoints] == [18200, 18201, 18202, 18203]
    instances = {
        relabeling.get("replacement")
        for endpoint in endpoints
        for relabeling in endpoint["relabelings"]
        if relabeling["targetLabel"] == "instance"
    }
    assert instances == {None, "$1/1", "$1/2", "$1/3"}
    assert [len(monitors[name]["spec"]["endpoints"]) for name in ("router", "prefill")] == [1, 1]


@pytest.mark.parametrize(("kind", "name"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_scalers_scale_groups(kind: str, name: str) -> None:
    pools = {"spread": SPREAD, "box": BOX}
    scaling = {"autoscaling": {"enabled": True, "kind": kind}}
    keda = {"prometheusAddress": "http://prometheus:9090"}
    manifests = render({"poolDefaults": scaling, "decodePools": pools, "keda": keda})
    makers = of_kind(manifests, "Deployment") | of_kind(manifests, "LeaderWorkerSet")
    for pool, scaler in of_kind(manifests, name).items():
        target, scaled = scaler["spec"]["scaleTargetRef"], makers[pool]
        assert target == {
            "apiVersion": scaled["apiVersion"],
            "kind": scaled["kind"],
            "name": scaled["metadata"]["name"],
        }
        assert "replicas" not in scaled["spec"]
    assert makers["decode-spread"]["kind"] == "LeaderWorkerSet"


def test_evictions_count_all_pods_of_a_group() -> None:
    manifests = render({"decodePools": {"default": {}, "spread": SPREAD}})
    budgets = of_kind(manifests, "PodDisruptionBudget")
    selected = budgets["decode-spread"]["spec"]["selector"]["matchLabels"]
    makers = pod_makers(manifests)
    chosen = {name for name, one in makers.items() if selected.items() <= labels_of(one).items()}
    assert chosen == {"decode-spread", "decode-spread-worker"}


def test_the_planner_reads_every_rank(parse: Parse) -> None:
    manifests = rendered(BOX, autoscale={"enabled": True})
    given = parse(container_of(of_kind(manifests, "Deployment")["autoscale"])["args"])
    assert [url.rpartition(":")[2] for url in given.decode_metrics] == [
        f"{port}/metrics" for port in range(18200, 18204)
    ]
    assert len(given.prefill_metrics) == 1


def test_examples_are_the_cases_that_they_say() -> None:
    rack, spread = (
        next(one for one in EXAMPLES if one.stem == stem)
        for stem in ("expert-parallel-rack", "server-over-two-nodes")
    )
    makers = pod_makers(render({}, rack))
    assert gpus_of(makers["decode-default"]) == len(port_numbers(makers["decode-default"], "grpc")) == 8
    makers = pod_makers(render({}, spread))
    pools = [name for name in makers if name.startswith(("prefill", "decode"))]
    assert sorted(pools) == [
        "decode-default",
        "decode-default-worker",
        "prefill-default",
        "prefill-default-worker",
    ]
    assert {gpus_of(makers[name]) for name in pools} == {8}
