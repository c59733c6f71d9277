"""What a pod's object says, whatever is in it."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import check_address
from router.kubernetes.cluster_error import ClusterError
from router.kubernetes.pod import NoServer, PodServer, claimants, offer_of
from router.kubernetes.settings import PodDiscovery, label_value
from tests.kubernetes_api import KubernetesApi
from wire.errors import ConfigError

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SERVES = frozenset({"tiny"})


def pod_of(**fields):
    return KubernetesApi().create_pod("one", **fields)


def test_a_ready_pod_offers_its_server():
    pod = pod_of(role="prefill", port=8100, ip="10.0.0.7", model="tiny")
    offer = offer_of(pod, SERVES)
    assert offer == PodServer(
        pod["metadata"]["uid"],
        "one",
        "prefill",
        "10.0.0.7:8100",
        is_ready=True,
        is_terminating=False,
        created=pod["metadata"]["creationTimestamp"],
    )


def test_readiness_and_the_end_are_seen():
    assert not offer_of(pod_of(ready=False), SERVES).is_ready
    pod = pod_of()
    del pod["status"]["conditions"]
    assert not offer_of(pod, SERVES).is_ready
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert offer_of(pod, SERVES).is_terminating


def test_an_ipv6_address_is_one_that_can_be_dialled():
    offer = offer_of(pod_of(ip="fd00:0::7", port=8200), SERVES)
    assert offer.address == "[fd00::7]:8200"
    check_address(offer.address)


@pytest.mark.parametrize(
    ("fields", "kind", "part"),
    [
        ({"ip": None}, "starting", "no IP"),
        ({"role": "router"}, "unusable", "'router', not prefill or decode"),
        ({"port": "http"}, "unusable", "'http', no port"),
        ({"port": "70000"}, "unusable", "no port from 1 to 65535"),
        ({"port": "٣"}, "unusable", "no port"),
        ({"ip": "nowhere"}, "unusable", "no IP address"),
        ({"model": "large"}, "other_model", "'large', and this router serves 'tiny'"),
    ],
    ids=str,
)
def test_what_a_pod_lacks_is_said(fields, kind, part):
    offer = offer_of(pod_of(**fields), SERVES)
    assert isinstance(offer, NoServer)
    assert (offer.kind, part in offer.reason) == (kind, True), offer.reason


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_whose_containers_have_ended_offers_nothing(phase):
    pod = pod_of()
    pod["status"]["phase"] = phase
    assert offer_of(pod, SERVES).kind == "ended"


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["metadata", "status", "spec"]), ANY_JSON), ANY_JSON, ANY_JSON)
def test_whatever_the_api_says_is_read_or_refused(pod, labels, status):
    for one in (pod, {"metadata": {"uid": "u", "name": "n", "labels": labels}, "status": status}):
        with suppress(ClusterError):
            assert isinstance(offer_of(one, SERVES), PodServer | NoServer)


@settings(max_examples=50)
@given(
    status=st.fixed_dictionaries(
        {}, optional={"podIP": ANY_JSON, "phase": ANY_JSON, "conditions": ANY_JSON | st.lists(ANY_JSON)}
    ),
    port=ANY_JSON,
    model=ANY_JSON,
)
def test_an_offer_has_an_address_that_can_be_dialled(status, port, model):
    labels = {"twinfang.io/role": "decode", "twinfang.io/port": port, "twinfang.io/model": model}
    offer = offer_of({"metadata": {"uid": "u", "name": "n", "labels": labels}, "status": status}, SERVES)
    if isinstance(offer, PodServer):
        check_address(offer.address)


def test_of_two_pods_with_one_address_the_one_that_lives_has_it():
    api = KubernetesApi()
    old, new = api.create_pod("old"), api.create_pod("new")
    alive = offer_of(new, SERVES)
    for change in (
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"creationTimestamp": "2025-01-01T00:00:00Z"},
    ):
        left = offer_of({**old, "metadata": old["metadata"] | change}, SERVES)
        for offers in ([left, alive], [alive, left]):
            assert claimants(offers) == {alive.uid: alive}


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("nvidia/Nemotron-H 8B", "nvidia-Nemotron-H-8B"),
        ("a" * 80, "a" * 63),
        ("a" * 62 + "/b", "a" * 62),
        ("_x.", "x"),
    ],
)
def test_a_model_s_name_becomes_a_label_s_value(name, label):
    assert label_value(name) == label


@pytest.mark.parametrize("namespace", ["", "UPPER", "a.b", "-a", "a" * 64, "a/b"])
def test_a_namespace_that_can_not_be_one_is_refused(namespace):
    with pytest.raises(ConfigError, match="no name of a namespace"):
        PodDiscovery(namespace)
