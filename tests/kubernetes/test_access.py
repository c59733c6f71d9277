"""What the service accounts of a release may do, as the API server decides: what docs say, no more."""

from __future__ import annotations

import pytest

from testing.kubernetes.api import RefusedError
from testing.kubernetes.cloud import CPU_DEMO, VALUES

PODS = "/api/v1/namespaces/{own}/pods"
REFUSED = [
    ("GET", "/api/v1/pods", {}),
    ("GET", "/api/v1/pods", {"watch": "true"}),
    ("GET", "/api/v1/namespaces/{other}/pods", {}),
    ("GET", "/api/v1/namespaces/{other}/pods", {"watch": "true"}),
    ("POST", PODS, {}),
    ("DELETE", PODS, {}),
    ("DELETE", PODS + "/a", {}),
    ("PATCH", PODS + "/a", {}),
    ("PATCH", PODS + "/a/status", {}),
    ("POST", PODS + "/a/eviction", {}),
    ("GET", PODS + "/a/log", {}),
    ("POST", PODS + "/a/exec", {"command": "id"}),
    ("GET", "/api/v1/namespaces/{own}/secrets", {}),
    ("GET", "/api/v1/namespaces/{own}/secrets/demo-twinfang-admin-token", {}),
    ("GET", "/api/v1/namespaces/{own}/configmaps", {}),
    ("POST", "/api/v1/namespaces/{own}/serviceaccounts/demo-twinfang-router/token", {}),
    ("GET", "/apis/apps/v1/namespaces/{own}/deployments/demo-twinfang-decode-default", {}),
    ("PATCH", "/apis/apps/v1/namespaces/{own}/deployments/demo-twinfang-decode-default/scale", {}),
    ("GET", "/api/v1/nodes", {}),
    ("GET", "/api/v1/namespaces", {}),
    ("PATCH", "/apis/rbac.authorization.k8s.io/v1/namespaces/{own}/roles/demo-twinfang-router", {}),
    ("POST", "/apis/rbac.authorization.k8s.io/v1/namespaces/{own}/rolebindings", {}),
    ("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {}),
]


def status_of(api, method, path, query):
    try:
        api.call(method, path, {} if method in ("POST", "PATCH") else None, query=query)
    except RefusedError as error:
        return error.status
    return 200


@pytest.fixture
def token_of(cloud):
    """Of a pod of the chart, as its node asks for it."""

    def of(component):
        deployment = "router" if component == "router" else f"{component}-default"
        pod = cloud.node.create(f"{cloud.release.prefix}-{deployment}", f"{component}-pod")
        return cloud.node.token_of(pod)

    return of


async def test_the_router_may_read_pods_of_its_namespace(plane, cloud, token_of):
    with plane.first.as_user(token_of("router")) as api:
        own = cloud.release.namespace
        for path, query in ((PODS, {}), (PODS, {"watch": "true"}), (PODS + "/router-pod", {})):
            assert status_of(api, "GET", path.format(own=own), query) == 200


async def test_the_router_may_do_nothing_else(plane, cloud, token_of, make_namespace):
    cloud.create("a")
    names = {"own": cloud.release.namespace, "other": make_namespace()}
    with plane.first.as_user(token_of("router")) as api:
        found = {
            (method, path, *query): status_of(api, method, path.format(**names), query)
            for method, path, query in REFUSED
        }
    assert found == dict.fromkeys(found, 403)


async def test_all_that_the_router_may_do_is_three_verbs_on_pods(plane, cloud, token_of):
    """Of its namespace's resources, as the API server itself sums it up."""
    assert resource_rules(plane, cloud, token_of("router")) == {
        ("pods", verb) for verb in ("get", "list", "watch")
    }


async def test_servers_may_do_nothing_at_all(plane, cloud, token_of):
    assert resource_rules(plane, cloud, token_of("decode")) == set()


def resource_rules(plane, cloud, token):
    """Pairs of resource and verb, without what everybody may ask about themselves."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview"}
    review["spec"] = {"namespace": cloud.release.namespace}
    with plane.first.as_user(token) as api:
        status = api.post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)["status"]
    assert not status["incomplete"]
    return {
        (resource, verb)
        for rule in status["resourceRules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if not resource.startswith(("selfsubject", "selfsubjectreviews"))
    }


async def test_routers_get_a_token_and_servers_get_none(cloud):
    mounted = {}
    for component in ("prefill-default", "decode-default", "router"):
        pod = cloud.node.create(f"{cloud.release.prefix}-{component}", f"{component}-pod")
        mounted[component] = any(
            "serviceAccountToken" in source
            for volume in pod["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
        )
    assert mounted == {"prefill-default": False, "decode-default": False, "router": True}


async def test_whoever_has_no_token_is_refused(plane, cloud):
    cloud.release.install(VALUES, CPU_DEMO)
    with plane.first.as_user("guessed") as api:
        assert status_of(api, "GET", PODS.format(own=cloud.release.namespace), {}) == 401
