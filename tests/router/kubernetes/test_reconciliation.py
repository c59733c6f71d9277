"""How known servers become wanted ones: never too early, never twice, never a pod that is being deleted."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.kubernetes.pod import PodServer, claimants
from router.kubernetes.reconciliation import ORDER, after, reconcile

PODS = st.builds(
    lambda uid, place, ready, terminating: PodServer(
        f"u{uid}",
        f"pod-{uid}",
        "decode" if place % 2 else "prefill",
        f"10.0.0.{place // 2}:8",
        ready,
        terminating,
    ),
    st.integers(0, 5),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
WORLDS = st.lists(st.lists(PODS, max_size=6), max_size=6)
"""What the API says at one moment and the next."""


class Applied:
    """What a router would make of changes: strict about each one's sense."""

    def __init__(self):
        self.servers = {}
        """Key to place, whether it is paused and whether it drains."""

    def apply(self, change):
        key, pod = change.pod.key, change.pod
        if change.kind == "add":
            assert key not in self.servers
            assert pod.place not in {place for place, _, _ in self.servers.values()}
            self.servers[key] = (pod.place, False, False)
            return
        place, paused, drains = self.servers.pop(key)
        if change.kind == "remove":
            return
        assert place == pod.place
        if change.kind == "drain":
            assert not drains
            drains = True
        else:
            assert paused == (change.kind == "resume")
            paused = not paused
        self.servers[key] = (place, paused, drains)

    def in_use(self):
        return {key for key, (_, paused, drains) in self.servers.items() if not paused and not drains}


@given(WORLDS)
def test_servers_follow_pods_through_any_history(worlds):
    known, applied = {}, Applied()
    for world in worlds:
        wanted = claimants({pod.key: pod for pod in world}.values())
        changes = reconcile(wanted, known)
        assert [change.kind for change in changes] == sorted(
            (change.kind for change in changes), key=ORDER.index
        )
        known = after(known, changes)
        for change in changes:
            applied.apply(change)
        has_ended = {key for key, (_, _, drains) in applied.servers.items() if drains}
        serving = {key for key, pod in wanted.items() if pod.is_ready and not pod.is_terminating}
        assert applied.in_use() == serving - has_ended
        assert applied.servers.keys() <= wanted.keys()
        assert {key: pod.place for key, pod in known.items()} == {
            key: place for key, (place, _, _) in applied.servers.items()
        }
        assert not reconcile(wanted, known), "what is done is done"


POD = PodServer("u", "pod", "decode", "10.0.0.1:8", is_ready=True, is_terminating=False)


def kinds(wanted, known):
    changes = reconcile({pod.key: pod for pod in wanted}, {pod.key: pod for pod in known})
    return [change.kind for change in changes]


def test_a_pod_is_added_when_it_is_ready_and_not_before():
    assert kinds([replace(POD, is_ready=False)], []) == []
    assert kinds([POD], []) == ["add"]
    assert kinds([replace(POD, is_terminating=True)], []) == []


def test_a_pod_that_is_deleted_drains_and_goes():
    assert kinds([replace(POD, is_terminating=True)], [POD]) == ["drain"]
    assert kinds([replace(POD, is_terminating=True, is_ready=False)], [POD]) == ["drain", "pause"]
    assert kinds([], [POD]) == ["remove"]


def test_a_pod_made_anew_at_one_address_is_another_server():
    assert kinds([replace(POD, uid="v")], [POD]) == ["remove", "add"]


def test_a_pod_whose_label_names_another_port_is_another_server():
    assert kinds([replace(POD, address="10.0.0.1:9")], [POD]) == ["remove", "add"]
    assert kinds([replace(POD, role="prefill", is_ready=False)], [POD]) == ["remove"]


def test_nothing_takes_an_end_back():
    ending = replace(POD, is_terminating=True)
    known = {POD.key: ending}
    known = after(known, reconcile({POD.key: replace(POD, is_ready=False)}, known))
    assert known[POD.key].is_terminating
