"""How a pod's object is read, whatever it contains."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import PodDiscovery, check_address
from router.kubernetes.cluster_error import ClusterError
from router.kubernetes.pod import NoServer, PodServer, claimants, label_value, offer_of
from router.policies.location import NOWHERE, Location
from testing.deploy.kubernetes_api import KubernetesApi
from wire.errors import ConfigError

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SERVES = frozenset({"tiny"})
PORT_TEXT = st.integers(0, 70_000).map(str)


def pod_of(**fields):
    return KubernetesApi().create_pod("one", **fields)


def server_of(pod):
    (server,) = offer_of(pod, SERVES)
    return server


def test_a_ready_pod_offers_its_server():
    pod = pod_of(role="prefill", port=8100, ip="10.0.0.7", model="tiny")
    offer = server_of(pod)
    assert offer == PodServer(
        pod["metadata"]["uid"],
        "one",
        "prefill",
        "10.0.0.7:8100",
        is_ready=True,
        is_terminating=False,
        created=pod["metadata"]["creationTimestamp"],
    )


def test_a_pod_says_where_it_runs():
    labels = {"twinfang.io/rack": "r1", "topology.kubernetes.io/zone": "z1"}
    pod = pod_of(labels=labels)
    pod["spec"]["nodeName"] = "n1"
    assert server_of(pod).location == Location("n1", "r1", "z1")
    assert server_of(pod_of()).location == NOWHERE


def test_readiness_and_the_end_are_seen():
    assert not server_of(pod_of(ready=False)).is_ready
    pod = pod_of()
    del pod["status"]["conditions"]
    assert not server_of(pod).is_ready
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert server_of(pod).is_terminating


def test_an_ipv6_address_is_one_that_can_be_dialled():
    offer = server_of(pod_of(ip="fd00:0::7", port=8200))
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
        ({"port": "8203-8200"}, "unusable", "'8203-8200', no port from 1 to 65535 and no range"),
        ({"port": "820-8203"}, "unusable", "no range of at most 64, as in 8200-8203"),
        ({"port": "8200-"}, "unusable", "no range"),
        ({"port": "8200-8201-8203"}, "unusable", "no range"),
        ({"ip": "nowhere"}, "unusable", "no IP address"),
        ({"model": "large"}, "other_model", "'large', and this router serves 'tiny'"),
    ],
    ids=str,
)
def test_what_a_pod_lacks_is_said(fields, kind, part):
    offer = offer_of(pod_of(**fields), SERVES)
    assert isinstance(offer, NoServer)
    assert (offer.kind, part in offer.reason) == (kind, True), offer.reason


def test_a_pod_with_a_range_of_ports_offers_a_server_on_each():
    offers = offer_of(pod_of(role="decode", port="8200-8203", ip="10.0.0.7"), SERVES)
    assert [offer.address for offer in offers] == [f"10.0.0.7:{port}" for port in range(8200, 8204)]
    assert len({offer.key for offer in offers}) == 4
    assert {offer.uid for offer in offers} == {offers[0].uid}
    (alone,) = offer_of(pod_of(port="8200-8200"), SERVES)
    assert alone.address.endswith(":8200")


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
            assert isinstance(offer_of(one, SERVES), tuple | NoServer)


@settings(max_examples=50)
@given(
    status=st.fixed_dictionaries(
        {}, optional={"podIP": ANY_JSON, "phase": ANY_JSON, "conditions": ANY_JSON | st.lists(ANY_JSON)}
    ),
    port=ANY_JSON | PORT_TEXT | st.builds("{}-{}".format, PORT_TEXT, PORT_TEXT),
    model=ANY_JSON,
)
def test_an_offer_has_an_address_that_can_be_dialled(status, port, model):
    labels = {"twinfang.io/role": "decode", "twinfang.io/port": port, "twinfang.io/model": model}
    offer = offer_of({"metadata": {"uid": "u", "name": "n", "labels": labels}, "status": status}, SERVES)
    if not isinstance(offer, NoServer):
        assert offer
        for server in offer:
            check_address(server.address)


def test_of_two_pods_with_one_address_the_one_that_lives_has_it():
    api = KubernetesApi()
    old, new = api.create_pod("old"), api.create_pod("new")
    alive = server_of(new)
    for change in (
        {"deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"creationTimestamp": "2025-01-01T00:00:00Z"},
    ):
        left = server_of({**old, "metadata": old["metadata"] | change})
        for offers in ([left, alive], [alive, left]):
            assert claimants(offers) == {alive.key: alive}


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
