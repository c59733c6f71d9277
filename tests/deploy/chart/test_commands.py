"""What the chart's containers run is what the command line takes, and the schema knows all of its flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.config import ROLE_LABEL
from router.kubernetes.pod import MODEL_LABEL, PORT_LABEL, label_value
from testing.deploy.helm import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    Parse,
    container_of,
    of_kind,
    pod_makers,
    pod_of,
    render,
)
from twinfang.commands.kernel_seed import CACHES
from twinfang.commands.table import AUTOSCALE, DECODE, PREFILL, ROUTER, Command
from wire.server import DRAIN_S, STOP_GRACE_S

SET_BY_THE_CHART = {
    *("host", "port", "advertise-host", "metrics-port", "model", "served-model-name", "device"),
    *("tls-cert", "tls-key", "tls-ca", "tls-names"),
    *("tensor-parallel", "hang-deadline", "speculative", "drafter"),
    *("otlp-endpoint", "prefill", "decode", "name"),
    *("kubernetes-namespace", "kubernetes-selector", "kubeconfig"),
    *("shutdown-grace", "api-keys-file", "limit-store", "admin-token-file"),
    *("ssl-certfile", "ssl-keyfile", "router-ca-file", "router-server-name", "router-token-file"),
    *("router-metrics", "prefill-metrics", "decode-metrics"),
    *("prefill-deployment", "decode-deployment", "apply"),
    *("data-parallel-size", "data-parallel-rank", "data-parallel-address", "probe-port"),
    *("enable-expert-parallel", "nnodes", "node-rank", "dist-init-addr"),
    "state-file",  # its changes are one router's, and a pod's disk ends with it
    *("response-store", "response-store-size", "response-store-ttl"),  # the same holds for its responses
}


@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda e: e.stem if e else "defaults")
def test_every_container_runs_a_command_that_twinfang_takes(example: Path | None, parse: Parse) -> None:
    manifests = render({}, *([example] if example else []))
    for name, deployment in pod_makers(manifests).items():
        container = container_of(deployment)
        assert container["args"][0] == name.partition("-")[0]
        parse(container["args"])


def test_the_planner_shows_routers_the_token_that_a_secret_holds(parse: Parse) -> None:
    planner = {"enabled": True, "routerToken": {"existingSecret": "viewer", "key": "api-key"}}
    deployment = of_kind(render({"autoscale": planner}), "Deployment")["autoscale"]
    (argument,) = (one for one in container_of(deployment)["args"] if one.startswith("--router-token-file="))
    (mount,) = (one for one in container_of(deployment)["volumeMounts"] if one["name"] == "router-token")
    assert argument == f"--router-token-file={mount['mountPath']}/api-key"
    (volume,) = (one for one in pod_of(deployment)["volumes"] if one["name"] == "router-token")
    assert (volume["secret"], mount["readOnly"]) == ({"secretName": "viewer"}, True)
    assert parse(container_of(deployment)["args"]).router_token_file.exists()


def test_servers_drain_before_they_are_stopped_and_have_time_for_it(
    parse: Parse,
) -> None:
    deployments = of_kind(render({"poolDefaults": {"drainSeconds": 77}}), "Deployment")
    for name in ("prefill-default", "decode-default"):
        container = container_of(deployments[name])
        program, *arguments = container["lifecycle"]["preStop"]["exec"]["command"]
        drain = parse(arguments)
        (grpc_port,) = (port["containerPort"] for port in container["ports"] if port["name"] == "grpc")
        assert (program, drain.server, drain.timeout) == ("twinfang", ((f"127.0.0.1:{grpc_port}",),), 77)
        grace_s = pod_of(deployments[name])["terminationGracePeriodSeconds"]
        assert grace_s > drain.timeout + DRAIN_S + STOP_GRACE_S


def test_a_server_that_hangs_is_restarted_without_waiting_for_its_drain(parse: Parse) -> None:
    values = {"decodePools": {"default": {"hangSeconds": 90}}}
    deployments = of_kind(render(values), "Deployment")
    for name, hang_s in (("prefill-default", 600), ("decode-default", 90)):
        container = container_of(deployments[name])
        assert parse(container["args"]).hang_deadline == hang_s
        probe = container["livenessProbe"]
        assert probe["httpGet"] == {"path": "/healthz", "port": "metrics"}
        assert probe["terminationGracePeriodSeconds"] <= probe["periodSeconds"]
        assert pod_of(deployments[name])["terminationGracePeriodSeconds"] > 120, "else there is time"


def test_compiled_kernels_are_where_the_pool_keeps_them() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "kernels"}}
    deployments = of_kind(render({"decodePools": {"default": {"cacheVolume": claim}}}), "Deployment")
    for name, source in (("prefill-default", {"emptyDir": {}}), ("decode-default", claim)):
        pod, container = pod_of(deployments[name]), container_of(deployments[name])
        (mounted,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "cache")
        assert {"name": "cache", **source} in pod["volumes"]
        caches = {v["name"]: v["value"] for v in container["env"] if v["name"] in CACHES.values()}
        assert set(caches) == set(CACHES.values()), "the variables that the image's kernels are copied by"
        assert all(folder.startswith(f"{mounted}/") for folder in caches.values())


def test_pods_of_ipv6_listen_and_drain_there(parse: Parse) -> None:
    deployments = of_kind(render({"ipFamily": "IPv6", "autoscale": {"enabled": True}}), "Deployment")
    containers = {name: container_of(deployment) for name, deployment in deployments.items()}
    assert {parse(container["args"]).host for container in containers.values()} == {"::"}
    for name, port in (("prefill-default", 8100), ("decode-default", 8200)):
        hook = containers[name]["lifecycle"]["preStop"]["exec"]["command"]
        assert parse(hook[1:]).server == ((f"[::1]:{port}",),)


@pytest.mark.parametrize("flags", [{}, {"request-timeout": 900.5}])
def test_routers_have_time_for_what_they_promise_to_wait_for(flags: dict[str, Any], parse: Parse) -> None:
    gateway = {"enabled": True, "parentRefs": [{"name": "public"}]}
    manifests = render({"router": {"flags": flags}, "gateway": gateway})
    deployment = of_kind(manifests, "Deployment")["router"]
    container = container_of(deployment)
    wait_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    given = parse(container["args"])
    assert pod_of(deployment)["terminationGracePeriodSeconds"] > wait_s + given.shutdown_grace
    assert given.shutdown_grace >= given.request_timeout, "no answer is cut off by an upgrade"
    (rule,) = of_kind(manifests, "HTTPRoute")["router"]["spec"]["rules"]
    assert int(rule["timeouts"]["request"].removesuffix("s")) > given.request_timeout


def test_no_deployment_is_given_up_while_a_model_may_still_load() -> None:
    values = {"decodePools": {"default": {"startTimeoutSeconds": 7200}}}
    deployments = of_kind(render(values), "Deployment")
    given = {name: one["spec"]["progressDeadlineSeconds"] for name, one in deployments.items()}
    assert given["prefill-default"] < 7200 < given["decode-default"] < given["router"]


def test_the_planner_reads_every_process_and_scales_the_two_deployments_if_told_to(
    parse: Parse,
) -> None:
    for apply in (False, True):
        manifests = render({"autoscale": {"enabled": True, "apply": apply}})
        deployments, services = of_kind(manifests, "Deployment"), of_kind(manifests, "Service")
        given = parse(container_of(deployments["autoscale"])["args"])
        for urls, service in (
            (given.router_metrics, services["router-metrics"]),
            (given.prefill_metrics, services["prefill"]),
            (given.decode_metrics, services["decode"]),
        ):
            port = next(p["port"] for p in service["spec"]["ports"] if p["name"] in ("http", "metrics"))
            assert urls == (f"http://{service['metadata']['name']}:{port}/metrics",)
            assert service["spec"]["clusterIP"] == "None", "one name for all pods"
        named = {given.prefill_deployment, given.decode_deployment}
        scaled = {deployments[f"{role}-default"]["metadata"]["name"] for role in ("prefill", "decode")}
        assert (given.apply, named) == ((True, scaled) if apply else (False, {None}))
        fixed = ["replicas" in deployments[f"{role}-default"]["spec"] for role in ("prefill", "decode")]
        assert fixed == [not apply] * 2


def test_values_of_flags_reach_the_command_line_as_they_are(
    parse: Parse,
) -> None:
    values = {
        "poolDefaults": {"flags": {"max-num-seqs": 100000, "dtype": "bfloat16", "sanitize": True}},
        "decodePools": {"default": {"flags": {"max-model-len": 1048576, "local-prefill": False}}},
        "router": {
            "flags": {"cors-origin": ["https://a.example", "https://b.example"], "request-timeout": 0.5}
        },
    }
    deployments = of_kind(render(values), "Deployment")
    decode = parse(container_of(deployments["decode-default"])["args"])
    assert (decode.max_num_seqs, decode.max_model_len, decode.dtype) == (100000, 1048576, "bfloat16")
    assert (decode.sanitize, decode.local_prefill) == (True, False)
    router = parse(container_of(deployments["router"])["args"])
    assert (router.cors_origin, router.request_timeout) == (("https://a.example", "https://b.example"), 0.5)


@pytest.mark.parametrize("name", ["nemotron-h-8b", "org/Model@v2", "_x" * 40, "größe"])
def test_routers_find_the_servers_of_their_release_and_model(name: str, parse: Parse) -> None:
    volume = {"hostPath": {"path": "/srv/models"}}
    deployments = of_kind(render({"model": {"name": name, "directory": "m", "volume": volume}}), "Deployment")
    router = parse(container_of(deployments["router"])["args"])
    assert router.kubernetes_namespace == NAMESPACE
    for role in ("prefill", "decode"):
        labels = deployments[f"{role}-default"]["spec"]["template"]["metadata"]["labels"]
        for term in router.kubernetes_selector.split(","):
            key, _, value = term.partition("=")
            assert key in labels
            assert value in ("", labels[key])
        assert (labels[ROLE_LABEL], labels[MODEL_LABEL]) == (role, label_value(router.served_model_name))
        server = parse(container_of(deployments[f"{role}-default"])["args"])
        assert int(labels[PORT_LABEL]) == server.port


@pytest.mark.parametrize(
    ("command", "definition"),
    [
        (PREFILL, "prefillFlags"),
        (DECODE, "decodeFlags"),
        (ROUTER, "routerFlags"),
        (AUTOSCALE, "autoscaleFlags"),
    ],
)
def test_the_schema_knows_every_flag_that_is_not_the_charts_own(command: Command, definition: str) -> None:
    assert set(schema_of(definition)) == names_of(command) - SET_BY_THE_CHART


def test_flags_for_all_pools_are_those_that_both_kinds_of_servers_have() -> None:
    assert set(schema_of("serverFlags")) == (names_of(PREFILL) & names_of(DECODE)) - SET_BY_THE_CHART


def names_of(command: Command) -> set[str]:
    flags = [flag for group in command.groups for flag in group.flags if not flag.is_internal]
    return {flag.name.removeprefix("--") for flag in flags}


def schema_of(definition: str) -> dict[str, Any]:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    properties: dict[str, Any] = schema["$defs"][definition]["properties"]
    return properties
