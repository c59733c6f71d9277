"""Models that init containers fetch: into which volume, by which command, over which ports."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from testing.deploy.helm import Manifest, Parse, Refusal, container_of, of_kind, pod_of, render

SOURCE = "https://hub.example.com/lab/tiny/resolve/v1"
CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}
EPHEMERAL = {"ephemeral": {"size": "10Gi"}}


def model(volume: Manifest, **download: Any) -> Manifest:
    return {"directory": "tiny", "volume": volume, "download": {"source": SOURCE} | download}


def fetches_of(deployment: Manifest) -> list[Manifest]:
    """Return the init containers. Each one's volumes are in the pod."""
    pod = pod_of(deployment)
    volumes = {volume["name"] for volume in pod["volumes"]}
    containers: list[Manifest] = pod.get("initContainers", [])
    for container in [*containers, *pod["containers"]]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    return containers


@pytest.mark.parametrize("kind", ["shared", "each pod's own"])
def test_servers_and_routers_fetch_before_they_start(kind: str, parse: Parse) -> None:
    secret = {"name": "hub", "key": "token"}
    volume = CLAIM if kind == "shared" else EPHEMERAL
    values = {"model": model(volume, tokenSecret=secret, env={"HTTPS_PROXY": "http://proxy:3128"})}
    manifests = render(values)
    for name, deployment in of_kind(manifests, "Deployment").items():
        kubernetes_validate.validate(deployment, "1.34", strict=True)
        (fetch,) = fetches_of(deployment)
        given = parse(fetch["args"])
        model_flag = next(one for one in container_of(deployment)["args"] if one.startswith("--model="))
        assert given.source == SOURCE
        assert model_flag.replace("--model=", "--directory=") in fetch["args"]
        assert given.without_weights == (name == "router" and kind != "shared")
        assert given.token_file is not None
        assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in fetch["env"]
        mounts = {mount["name"]: mount for mount in fetch["volumeMounts"]}
        assert not mounts["model"].get("readOnly")
        assert "model-token" not in {one["name"] for one in container_of(deployment)["volumeMounts"]}
        assert fetch["securityContext"]["readOnlyRootFilesystem"]
        source = next(one for one in pod_of(deployment)["volumes"] if one["name"] == "model")
        if kind == "shared":
            assert source["persistentVolumeClaim"] == {"claimName": "models", "readOnly": False}
        else:
            assert ("emptyDir" if name == "router" else "ephemeral") in source
    for name in ("router", "server"):
        policy = of_kind(manifests, "NetworkPolicy")[name]
        assert {"ports": [{"port": 443}]} in policy["spec"]["egress"]


def test_deployments_are_not_given_up_while_a_model_is_fetched() -> None:
    deployments = of_kind(render({"model": model(CLAIM, timeoutSeconds=20_000)}), "Deployment")
    assert all(one["spec"]["progressDeadlineSeconds"] > 20_000 for one in deployments.values())


def test_routers_with_a_volume_of_their_own_fetch_nothing() -> None:
    values = {"model": model(CLAIM), "router": {"modelVolume": {"hostPath": {"path": "/srv/tokenizers"}}}}
    deployments = of_kind(render(values), "Deployment")
    assert {name for name, one in deployments.items() if fetches_of(one)} == {
        "prefill-default",
        "decode-default",
    }


def test_each_of_several_models_is_fetched_from_its_own_source() -> None:
    pools = {"prefillPools": {"a": {}}, "decodePools": {"a": {}}}
    other = {"prefillPools": {"b": {}}, "decodePools": {"b": {}}, "directory": "other", "volume": CLAIM}
    store = {
        "source": "s3://models/other",
        "envSecret": "store",
        "env": {"AWS_ENDPOINT_URL": "http://store:9000"},
    }
    manifests = render({"models": [model(EPHEMERAL) | pools, other | {"download": store}]})
    router = of_kind(manifests, "Deployment")["router"]
    first, second = fetches_of(router)
    assert f"--source={SOURCE}" in first["args"]
    assert "--directory=/models/0/tiny" in first["args"]
    assert "--without-weights" in first["args"]
    assert "--source=s3://models/other" in second["args"]
    assert second["envFrom"] == [{"secretRef": {"name": "store"}}]
    models = [one for one in container_of(router)["args"] if one.startswith("--model=")]
    assert models == ["--model=tiny=/models/0/tiny", "--model=other=/models/1/other"]
    for name in ("router", "server"):
        policy = of_kind(manifests, "NetworkPolicy")[name]
        assert {"ports": [{"port": 443}, {"port": 9000}]} in policy["spec"]["egress"]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (model({}) | {"directory": ""}, "give it a directory below the root of a volume that can be written"),
        (model(CLAIM) | {"directory": ".", "name": "m"}, "below the root of a volume"),
        (model({"image": {"reference": "m:1"}}), "a volume that can be written"),
        ({"directory": "m", "volume": EPHEMERAL}, "model.volume.ephemeral is empty at each pod's start"),
        (model(CLAIM, source="hub/model"), "'hub/model' does not match"),
        (
            model(CLAIM, source="s3://a/b", tokenSecret={"name": "t"}),
            "a token is sent over https alone, not to s3://a/b",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_source_that_can_not_work_is_refused(values: Manifest, complaint: str) -> None:
    with pytest.raises(Refusal) as refusal:
        render({"model": values})
    assert complaint in refusal.value.message
