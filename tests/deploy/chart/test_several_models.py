"""One release with several models: who serves which, and where its files are."""

from __future__ import annotations

from typing import Any

import pytest

from router.kubernetes.pod import NoServer, label_value, offer_of
from testing.deploy.helm import DEPLOY, Manifest, Parse, Refusal, container_of, of_kind, pod_of, render

VOLUME = {"hostPath": {"path": "/srv/models"}}
ONE: Manifest = {"directory": "one", "volume": VOLUME, "prefillPools": {"a": {}}, "decodePools": {"a": {}}}
TWO: Manifest = {"directory": "two", "volume": VOLUME, "prefillPools": {"b": {}}, "decodePools": {"b": {}}}
POOLS = {
    "nemotron-h-8b": ("prefill-small", "decode-small"),
    "granite-4-h/large": ("prefill-large", "decode-large", "decode-long"),
}


@pytest.fixture(scope="module")
def deployments() -> dict[str, Manifest]:
    return of_kind(render({}, DEPLOY / "examples" / "several-models.yaml"), "Deployment")


def test_routers_serve_every_model_with_its_own_servers(
    deployments: dict[str, Manifest], parse: Parse
) -> None:
    assert set(deployments) == {"router", *(pool for pools in POOLS.values() for pool in pools)}
    served = {source.name for source in parse(container_of(deployments["router"])["args"]).model}
    assert served == set(POOLS)
    labels = frozenset(map(label_value, served))
    for model, pools in POOLS.items():
        for name in pools:
            template = deployments[name]["spec"]["template"]
            pod = {
                "metadata": template["metadata"] | {"uid": name, "name": name},
                "status": {"podIP": "10.0.0.1"},
            }
            assert not isinstance(offer_of(pod, labels), NoServer)
            assert offer_of(pod, labels - {label_value(model)}) == NoServer(
                *(name, name, "other_model"),
                f"its label twinfang.io/model is {label_value(model)!r}, and this router serves "
                + ", ".join(map(repr, labels - {label_value(model)})),
            )
            assert parse(container_of(deployments[name])["args"]).served_model_name == model


def test_a_pool_has_what_its_model_and_then_what_it_says_itself(
    deployments: dict[str, Manifest], parse: Parse
) -> None:
    def flags(name: str) -> tuple[Any, ...]:
        given = parse(container_of(deployments[name])["args"])
        return given.tensor_parallel, given.speculative, given.kv_cache_dtype, given.max_model_len

    assert flags("decode-small") == (1, 0, "auto", None)
    assert flags("decode-large") == (4, 3, "fp8", None)
    assert flags("decode-long") == (4, 3, "fp8", 262144)
    assert container_of(deployments["decode-long"])["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert deployments["decode-small"]["spec"]["replicas"] == 3


@pytest.mark.parametrize("own_volume", [False, True], ids=["of the models", "of its own"])
def test_a_router_finds_each_models_files_in_a_volume_that_it_mounts(own_volume: bool) -> None:
    values: Manifest = {"models": [ONE, TWO | {"volume": {"persistentVolumeClaim": {"claimName": "c"}}}]}
    if own_volume:
        values["router"] = {"modelVolume": {"persistentVolumeClaim": {"claimName": "tokenizers"}}}
    router = of_kind(render(values), "Deployment")["router"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container_of(router)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_of(router)["volumes"]}
    found = {}
    for argument in container_of(router)["args"]:
        flag, _, value = argument.partition("=")
        if flag == "--model":
            name, _, path = value.partition("=")
            mount = next(one for one in mounts if path.startswith(f"{one}/"))
            source = volumes[mounts[mount]]
            found[name] = (
                path.removeprefix(f"{mount}/"),
                source.get("hostPath") or source["persistentVolumeClaim"],
            )
    if own_volume:
        claim = {"claimName": "tokenizers", "readOnly": True}
        assert found == {"one": ("one", claim), "two": ("two", claim)}
    else:
        path = {"path": "/srv/models", "type": "Directory"}
        assert found == {"one": ("one", path), "two": ("two", {"claimName": "c", "readOnly": True})}


def test_a_list_of_one_model_renders_what_the_model_alone_does() -> None:
    """So a release can get a second model without a restart of the first one's servers."""
    alone = {"model": {"directory": "one", "volume": VOLUME}, "speculative": {"tokens": 2}}
    listed = ONE | {
        "prefillPools": {"default": {}},
        "decodePools": {"default": {}},
        "speculative": {"tokens": 2},
    }
    assert render({"models": [listed]}) == render(alone)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"models": [ONE, TWO], "model": {"name": "m"}}, "model.name and models are both set"),
        ({"models": [ONE], "decodePools": {"c": {}}}, "decodePools.c and models are both set"),
        ({"models": [ONE], "prefillPools": {"default": {"replicas": 2}}}, "prefillPools.default and models"),
        ({"models": [ONE, TWO | {"name": "one"}]}, 'models: two entries are named "one"'),
        (
            {"models": [ONE, TWO | {"decodePools": {"a": {}}}]},
            "two models have a pool named a in decodePools",
        ),
        ({"models": [ONE, TWO | {"prefillPools": {}}]}, "no decode pool runs prompts of model two itself"),
        ({"models": [ONE, TWO | {"decodePools": {}}]}, "at least one decode server for model two"),
        ({"models": [{"name": "m", "decodePools": {}}]}, "missing properties 'directory', 'volume'"),
        ({"models": [ONE | {"name": "a=b"}]}, "'a=b' does not match"),
        ({"models": [ONE | {"replicas": 2}]}, "'replicas' not allowed"),
        ({"models": [ONE, TWO], "autoscale": {"enabled": True}}, "prefillPools has 2: a, b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_contradicts_is_named(values: Manifest, complaint: str) -> None:
    with pytest.raises(Refusal) as refusal:
        render(values)
    assert complaint in refusal.value.message
