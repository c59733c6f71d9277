"""Values that can't work are refused before anything is installed, by name."""

from __future__ import annotations

from typing import Any

import pytest

from testing.deploy.helm import Refusal, render

GROUP = {"dataParallel": 4, "expertParallel": True, "leaderWorkerSet": {"size": 2}}
DIRECTORY_IN_IMAGE = {"name": "m", "directory": ".", "volume": {"image": {"reference": "models/m:1"}}}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"router": {"replica": 3}}, "at '/router': additional properties 'replica' not allowed"),
        (
            {"prefillPools": {"default": {"replicas": "two"}}},
            "at '/prefillPools/default/replicas': got string",
        ),
        ({"decodePools": {"default": {"flags": {"max-num-seq": 4}}}}, "'max-num-seq' not allowed"),
        ({"prefillPools": {"default": {"flags": {"local-prefill": True}}}}, "'local-prefill' not allowed"),
        ({"poolDefaults": {"flags": {"cache-mode": "some"}}}, "at '/poolDefaults/flags/cache-mode'"),
        ({"poolDefaults": {"sharedMemory": "1GiB"}}, "'1GiB' does not match"),
        ({"decodePools": {"Big": {}}}, "'Big' does not match"),
        ({"image": {"digest": "latest"}}, "at '/image/digest': 'latest' does not match"),
        (
            {"routerImage": {"repository": "registry:5000/twinfang-router:0.2.0"}},
            'routerImage.repository "registry:5000/twinfang-router:0.2.0": a tag goes into routerImage.tag',
        ),
        (
            {"decodePools": {"default": {"flags": {"block-size": 32}}}},
            "flags.block-size: prefillPools.default has the default and decodePools.default has 32, and",
        ),
        (
            {
                "poolDefaults": {"flags": {"dtype": "bfloat16"}},
                "prefillPools": {"default": {"flags": {"dtype": "float32"}}},
            },
            "flags.dtype: prefillPools.default has float32 and decodePools.default has bfloat16, and",
        ),
        (
            {"auth": {"apiKeys": {"existingSecret": "keys", "lines": [f"alice sha256:{'a' * 64}"]}}},
            "auth.apiKeys: existingSecret and lines are both set",
        ),
        (
            {"auth": {"limitStore": {"existingSecret": "store", "url": "redis://redis:6379/0"}}},
            "auth.limitStore: existingSecret and url are both set",
        ),
        ({"auth": {"limitStore": {"url": "sqlite:/tmp/limits"}}}, "at '/auth/limitStore/url'"),
        (
            {"auth": {"adminToken": {"existingSecret": "token", "digest": f"sha256:{'a' * 64}"}}},
            "auth.adminToken: existingSecret and digest are both set",
        ),
        ({"auth": {"apiKeys": {"lines": ["alice twinfang-secret"]}}}, "at '/auth/apiKeys/lines/0'"),
        ({"auth": {"adminToken": {"digest": "secret"}}}, "at '/auth/adminToken/digest'"),
        ({"model": {"volume": {"hostPath": {"path": "/m"}, "image": {"reference": "m"}}}}, "maxProperties"),
        ({"model": {"directory": "m"}}, 'model.directory "m": there is no model.volume'),
        ({"model": {"volume": {"hostPath": {"path": "/m"}}}}, "but not model.directory"),
        ({"model": {"directory": ".", "volume": {"hostPath": {"path": "/m"}}}}, "set model.name"),
        ({"decodePools": {"default": None}}, "decodePools is empty"),
        ({"prefillPools": {"default": None}}, "prefillPools is empty"),
        (
            {"autoscale": {"enabled": True}, "decodePools": {"second": {}}},
            "autoscale.enabled: it plans one pool of each role, and decodePools has 2: default, second",
        ),
        (
            {
                "autoscale": {"enabled": True, "apply": True},
                "poolDefaults": {"autoscaling": {"enabled": True}},
            },
            "prefillPools.default.autoscaling.enabled and autoscale.apply",
        ),
        (
            {"autoscale": {"enabled": True, "flags": {"min-decode": 9}}},
            "autoscale.flags: min-decode 9 is above max-decode 8",
        ),
        (
            {"poolDefaults": {"strategy": {"rollingUpdate": {"maxSurge": 0}}}},
            "prefillPools.default.strategy.rollingUpdate: maxSurge and maxUnavailable are both 0",
        ),
        (
            {"router": {"strategy": {"rollingUpdate": {"maxSurge": "0%"}}}},
            "router.strategy.rollingUpdate: maxSurge and maxUnavailable are both 0",
        ),
        ({"decodePools": {"default": {"env": {"HOME": "/"}}}}, "decodePools.default.env.HOME"),
        (
            {"nixl": {"transports": "tcp"}, "poolDefaults": {"env": {"UCX_TLS": "rc"}}},
            "prefillPools.default.env.UCX_TLS: the chart sets this one itself",
        ),
        ({"prefillPools": {"default": {"dataParallel": 2}}}, "'dataParallel' not allowed"),
        ({"decodePools": {"default": {"flags": {"nnodes": 2}}}}, "'nnodes' not allowed"),
        (
            {"decodePools": {"default": {"flags": {"enable-expert-parallel": True}}}},
            "'enable-expert-parallel' not allowed",
        ),
        ({"poolDefaults": {"leaderWorkerSet": {"size": 0}}}, "at '/poolDefaults/leaderWorkerSet/size'"),
        (
            {"prefillPools": {"default": {"tensorParallel": 6, "leaderWorkerSet": {"size": 4}}}},
            "prefillPools.default.tensorParallel 6 can't be divided among the 4 pods of "
            "leaderWorkerSet.size: choose a multiple of 4",
        ),
        (
            {"decodePools": {"default": GROUP | {"dataParallel": 3, "tensorParallel": 2}}},
            "decodePools.default.dataParallel 3 can't be divided among the 2 pods of leaderWorkerSet.size: "
            "choose a multiple of 2; a data-parallel rank's tensorParallel processes are in one pod",
        ),
        (
            {"decodePools": {"default": GROUP | {"expertParallel": False}}},
            "decodePools.default.leaderWorkerSet.size 2: dataParallel ranks without expertParallel share",
        ),
        (
            {"decodePools": {"default": {"expertParallel": True}}},
            "decodePools.default.expertParallel: there is one rank, which has all experts; set dataParallel",
        ),
        (
            {"decodePools": {"default": GROUP | {"dataParallel": 200}}},
            "decodePools.default.dataParallel 200: a pod has 64 servers at most, not 100; set leaderWorker",
        ),
        (
            {"decodePools": {"default": GROUP | {"strategy": {"type": "Recreate"}}}},
            "decodePools.default.strategy.type Recreate: a LeaderWorkerSet knows RollingUpdate alone",
        ),
        (
            {"fullnameOverride": "c" * 30, "decodePools": {"of-many-letters": GROUP}},
            "-decode-of-many-letters has a name of 53 characters, and with the numbers of its pods there is",
        ),
        (
            {"autoscale": {"enabled": True, "apply": True}, "decodePools": {"default": GROUP}},
            "autoscale.apply: it scales Deployments whose pods are one server each, and decodePools.default",
        ),
        ({"router": {"extraEnvs": []}}, "at '/router': additional properties 'extraEnvs' not allowed"),
        ({"prefillPools": {"default": {"podLabel": {}}}}, "'podLabel' not allowed"),
        ({"poolDefaults": {"sidecars": [{"image": "a"}]}}, "at '/poolDefaults/sidecars/0': missing property"),
        ({"router": {"podSpec": {"containers": [{"tty": True}]}}}, "at '/router/podSpec/containers/0'"),
        ({"poolDefaults": {"sharedHost": {"gpus": [0]}}}, "'sharedHost' not allowed"),
        (
            {"poolDefaults": {"podLabels": {"twinfang.io/role": "decode"}}},
            "prefillPools.default.podLabels: the chart sets twinfang.io/role itself; leave it out",
        ),
        (
            {"router": {"workloadLabels": {"helm.sh/chart": "mine"}}},
            "router.workloadLabels: the chart sets helm.sh/chart itself; leave it out",
        ),
        (
            {"router": {"extraEnv": [{"name": "HOME", "value": "/"}]}},
            "router.env or extraEnv: the variable HOME is set twice, or by the chart as well; leave it out",
        ),
        (
            {"decodePools": {"default": {"extraVolumes": [{"name": "cache", "emptyDir": {}}]}}},
            "decodePools.default.extraVolumes: the pod has a volume cache already; choose another name, or",
        ),
        (
            {"router": {"sidecars": [{"name": "router", "image": "mine"}]}},
            "router.sidecars: the pod has a container router already; choose another name, or change that",
        ),
        (
            {"decodePools": {"default": {"sharedHost": {"gpus": [0, 1]}}}},
            "decodePools.default.sharedHost.gpus names 2 GPUs, and a pod has 1 ranks: name one GPU for each",
        ),
        (
            {name: {"default": {"sharedHost": {"gpus": [0]}}} for name in ("prefillPools", "decodePools")},
            "prefillPools.default.sharedHost.gpus: decodePools.default uses GPU 0 too; give each pool",
        ),
        (
            {"prefillPools": {"default": {"device": "cpu", "sharedHost": {"gpus": [0]}}}},
            "prefillPools.default.sharedHost.gpus: device cpu has no GPUs to share; leave sharedHost out",
        ),
        ({"fullnameOverride": "Chat_1"}, "'Chat_1' does not match"),
        ({"poolDefaults": {"sharedMemory": None}}, "missing property 'sharedMemory'"),
        ({"router": None}, "missing property 'router'"),
        ({"gateway": {"enabled": True}}, "gateway.parentRefs names no gateway"),
        ({"nixl": {"portRange": "30000-20000"}}, 'nixl.portRange "30000-20000"'),
        (
            {"router": {"flags": {"workers": 2}}, "auth": {"adminToken": {"existingSecret": "t"}}},
            "router.flags.workers 2 and auth.adminToken",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(Refusal) as refusal:
        render(values)
    assert complaint in refusal.value.message


@pytest.mark.parametrize("part", ["flags", "env", "resources", "nodeSelector", "affinity"])
def test_a_map_that_is_left_empty_is_an_empty_map(part: str) -> None:
    """As in a file of values whose lines below the name are commented out."""
    autoscale = {"enabled": True} if part == "env" else {"enabled": True, part: None}
    render({"router": {part: None}, "poolDefaults": {part: None}, "autoscale": autoscale})


def test_a_registry_may_have_a_port() -> None:
    render({"image": {"repository": "registry:5000/llm/twinfang-cuda"}})


def test_the_default_may_be_written_out() -> None:
    render({"decodePools": {"default": {"flags": {"dtype": "auto", "batch-invariant": False}}}})


def test_pools_that_say_nothing_of_groups_are_none() -> None:
    assert "LeaderWorkerSet" not in {
        one["kind"] for one in render({"poolDefaults": {"leaderWorkerSet": None}})
    }


def test_an_image_volume_needs_a_version_of_kubernetes_that_has_them() -> None:
    with pytest.raises(Refusal, match=r"model\.volume\.image needs Kubernetes 1\.31, this is v1\.30"):
        render({"model": DIRECTORY_IN_IMAGE}, kube_version="1.30")
    assert render({"model": DIRECTORY_IN_IMAGE}, kube_version="1.31")


def test_an_old_cluster_is_refused_as_a_whole() -> None:
    with pytest.raises(Refusal, match=r"1\.26"):
        render(kube_version="1.26")


def test_decode_servers_that_prefill_themselves_need_no_prefill_pool() -> None:
    render({"prefillPools": {"default": None}, "decodePools": {"default": {"flags": {"role": "both"}}}})
