"""What operators add to pods beyond the chart's own values, and where pods then run."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from testing.deploy.helm import Manifest, container_of, of_kind, pod_makers, pod_of, render
from testing.deploy.leader_worker_sets import validate_group

TOKEN = {"name": "HUB_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
VOLUMES = [
    {"name": "secrets", "csi": {"driver": "secrets.example.com", "readOnly": True}},
    {"name": "adapter", "image": {"reference": "models.example.com/adapter:1"}},
]
MOUNTS = [{"name": volume["name"], "mountPath": f"/mnt/{volume['name']}"} for volume in VOLUMES]
BEFORE = {"name": "permissions", "image": "busybox:1.37", "command": ["true"]}
BESIDE = {"name": "shipper", "image": "shipper:1", "args": ["--follow"]}
ADDED: Manifest = {
    "podLabels": {"team": "inference"},
    "podAnnotations": {"example.com/scrape": "yes"},
    "workloadLabels": {"kueue.x-k8s.io/queue-name": "gpus"},
    "extraEnv": [TOKEN],
    "extraVolumes": VOLUMES,
    "extraVolumeMounts": MOUNTS,
    "initContainers": [BEFORE],
    "sidecars": [BESIDE],
    "serviceAccount": {"name": "with-an-identity"},
    "schedulerName": "volcano",
    "hostNetwork": True,
}
SPREAD: Manifest = {"tensorParallel": 16, "leaderWorkerSet": {"size": 2}}
"""One server in two pods."""


@pytest.fixture(scope="module")
def extended() -> list[Manifest]:
    """A release with every addition, in all pods that serve: routers, a Deployment and a LeaderWorkerSet."""
    claims = {"hostIPC": True, "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "rdma"}]}
    patch = {
        "securityContext": {"runAsUser": 1000710000},
        "enableServiceLinks": True,
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "server", "tty": True, "resources": {"limits": {"memory": "1Gi"}}}],
        "volumes": [{"name": "cache", "hostPath": {"path": "/var/cache/twinfang"}}],
    }
    return render(
        {
            "model": {"name": "m", "directory": ".", "volume": {"csi": {"driver": "models.example.com"}}},
            "poolDefaults": ADDED | claims | {"podSpec": patch},
            "decodePools": {"default": SPREAD},
            "router": ADDED | {"podSpec": {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}]}},
        }
    )


def serving(manifests: list[Manifest]) -> dict[str, Manifest]:
    found = pod_makers(manifests)
    assert set(found) == {"router", "prefill-default", "decode-default", "decode-default-worker"}
    return found


def test_pods_have_what_values_add_to_them(extended: list[Manifest]) -> None:
    for name, maker in serving(extended).items():
        pod, metadata = pod_of(maker), maker["spec"]["template"]["metadata"]
        assert metadata["labels"]["team"] == "inference"
        assert metadata["annotations"]["example.com/scrape"] == "yes"
        assert maker["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert "team" not in maker["metadata"]["labels"]
        own, beside = pod["containers"]
        assert own["name"] == ("router" if name == "router" else "server")
        assert (pod["initContainers"], beside) == ([BEFORE], BESIDE)
        assert own["env"][-1] == TOKEN
        assert own["volumeMounts"][-2:] == MOUNTS
        assert [volume for volume in pod["volumes"] if volume in VOLUMES] == VOLUMES
        assert {"name": "model", "csi": {"driver": "models.example.com"}} in pod["volumes"]
        assert (pod["serviceAccountName"], pod["schedulerName"]) == ("with-an-identity", "volcano")
        assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        if name != "router":
            assert pod["hostIPC"]
            assert pod["resourceClaims"] == [{"name": "nic", "resourceClaimTemplateName": "rdma"}]
            assert own["resources"]["claims"] == [{"name": "nic"}]


def test_a_raw_pod_spec_has_the_last_word(extended: list[Manifest]) -> None:
    makers = serving(extended)
    assert pod_of(makers.pop("router"))["hostAliases"] == [{"ip": "10.0.0.1", "hostnames": ["a"]}]
    for maker in makers.values():
        pod, own = pod_of(maker), container_of(maker)
        assert pod["securityContext"]["runAsUser"] == 1000710000
        assert pod["securityContext"]["fsGroup"] == 10001, "maps are merged"
        assert pod["enableServiceLinks"] is True
        assert pod["tolerations"] == [{"operator": "Exists"}]
        assert own["tty"], "containers are merged by name"
        assert own["args"][0] in ("prefill", "decode")
        assert own["resources"]["limits"]["memory"] == "1Gi"
        assert own["resources"]["limits"]["nvidia.com/gpu"], "what the patch leaves out stays"
        caches = [volume for volume in pod["volumes"] if volume["name"] == "cache"]
        assert caches == [{"name": "cache", "hostPath": {"path": "/var/cache/twinfang"}}]


def test_an_account_of_the_operators_gets_the_routers_rights(extended: list[Manifest]) -> None:
    (binding,) = of_kind(extended, "RoleBinding").values()
    assert [subject["name"] for subject in binding["subjects"]] == ["with-an-identity"]
    assert "router" not in of_kind(extended, "ServiceAccount")


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_extended_pods_are_valid(extended: list[Manifest], version: str) -> None:
    for manifest in extended:
        if manifest["kind"] == "LeaderWorkerSet":
            validate_group(manifest, version)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_gpus_can_come_with_claims_alone() -> None:
    pool = {"gpuResource": "", "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two"}]}
    own = container_of(of_kind(render({"poolDefaults": pool}), "Deployment")["decode-default"])
    assert "nvidia.com/gpu" not in own["resources"]["limits"]
    assert own["resources"]["claims"] == [{"name": "gpus"}]


def test_servers_that_share_a_host_see_each_others_gpus_and_no_two_use_the_same() -> None:
    strategy = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    manifests = render(
        {
            "poolDefaults": {"tensorParallel": 2, "strategy": strategy},
            "prefillPools": {"default": {"sharedHost": {"gpus": [0, 1]}}},
            "decodePools": {
                "default": {"sharedHost": {"gpus": [4, 5]}},
                "second": {"sharedHost": {"gpus": [2, 3]}},
                "elsewhere": {},
            },
        }
    )
    makers = of_kind(manifests, "Deployment")
    seen = {"prefill-default": "0,1,4,5,2,3", "decode-default": "4,5,0,1,2,3", "decode-second": "2,3,0,1,4,5"}
    for name, gpus in seen.items():
        pod, own = pod_of(makers[name]), container_of(makers[name])
        variables = {one["name"]: one.get("value") for one in own["env"]}
        assert (variables["CUDA_VISIBLE_DEVICES"], variables["NVIDIA_VISIBLE_DEVICES"]) == (gpus, "all")
        assert own["resources"]["limits"]["nvidia.com/gpu"] == "2", "the scheduler still counts them"
        assert pod["hostIPC"] is pod["hostPID"] is True
        (apart,) = required(pod, "podAntiAffinity")
        assert apart == (
            "kubernetes.io/hostname",
            makers[name]["spec"]["selector"]["matchLabels"],
        ), "its GPUs are numbers, so a second pod of the pool would use the same"
        beside = required(pod, "podAffinity")
        if name == "prefill-default":
            assert beside == [], "else the first prefill and the first decode pod would wait for each other"
        else:
            (with_prefill,) = beside
            assert with_prefill[0] == "kubernetes.io/hostname"
            assert with_prefill[1]["app.kubernetes.io/component"] == "prefill"
    for name in ("router", "decode-elsewhere"):
        assert not {"hostIPC", "hostPID", "affinity"} & set(pod_of(makers[name]))


def required(pod: Manifest, kind: str) -> list[tuple[str, dict[str, Any]]]:
    terms = pod["affinity"].get(kind, {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    return [(term["topologyKey"], term["labelSelector"]["matchLabels"]) for term in terms]


def test_servers_are_placed_near_those_of_the_other_role_beside_what_values_ask_for() -> None:
    zone = "topology.kubernetes.io/zone"
    away = {"weight": 5, "podAffinityTerm": {"topologyKey": "rack", "labelSelector": {}}}
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}},
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [away]},
    }
    values = {"poolDefaults": {"topologyKey": zone}, "decodePools": {"default": {"affinity": affinity}}}
    makers = of_kind(render(values), "Deployment")
    labels = {
        name: makers[f"{name}-default"]["spec"]["template"]["metadata"]["labels"]
        for name in ("prefill", "decode")
    }
    for name, other in (("prefill", "decode"), ("decode", "prefill")):
        given = pod_of(makers[f"{name}-default"])["affinity"]
        *own, near = given["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert own == ([away] if name == "decode" else [])
        assert near["podAffinityTerm"]["topologyKey"] == zone
        wanted = near["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert wanted.items() <= labels[other].items()
        assert not wanted.items() <= labels[name].items()
    assert given["nodeAffinity"] == affinity["nodeAffinity"]
    assert "affinity" not in pod_of(makers["router"])
