"""How the hosts of one server find each other: who is accepted, who is refused, and which messages both
get."""

from __future__ import annotations

from concurrent import futures
from dataclasses import replace

import pytest

from engine.group import store as group_store
from engine.group.nodes import Nodes
from engine.group.store import GroupStore
from engine.ranks.node_links import NodeLinks, call_rank_0
from testing.certificates import Authority
from twinfang.stack.ports import LOOPBACK, free_ports
from wire.errors import ConfigError, DeadlineError
from wire.messages.ranks import RankLeaves

SOON_S = 20.0


def store():
    """Of a group that has not met, at a free port."""
    return GroupStore(f"{LOOPBACK}:{free_ports(1)[0]}", "nodes.store")


@pytest.fixture
def callers():
    with futures.ThreadPoolExecutor() as pool:
        yield pool


def test_a_host_has_its_line_before_the_next_one_has_come(callers):
    place = store()
    links = NodeLinks(Nodes(0, 3, place), 3).accept()
    for caller in (2, 1):
        calling = callers.submit(call_rank_0, Nodes(caller, 3, place), caller, 3)
        rank, ours = next(links)
        assert rank == caller
        calling.result(SOON_S).send(RankLeaves())
        assert ours.receive(RankLeaves) == RankLeaves()
    assert list(links) == []


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ((2, 2), r"`tensor_parallel` is 2 on tensor-parallel rank 1 on host 1 and 4 on .* rank 0 on host 0"),
        (
            (4, 4),
            r"`nodes.size` is 4 on tensor-parallel rank 1 on host 1 "
            r"and 2 on tensor-parallel rank 0 on host 0",
        ),
    ],
)
def test_hosts_that_count_otherwise_refuse_one_another_with_both_values(callers, theirs, says):
    place = store()
    links = NodeLinks(Nodes(0, 2, place), 4).accept()
    num_hosts, num_ranks = theirs
    calling = callers.submit(call_rank_0, Nodes(1, num_hosts, place), 1, num_ranks)
    with pytest.raises(ConfigError, match=says):
        next(links)
    with pytest.raises(ConfigError, match="must be the same on all ranks"):
        calling.result(SOON_S)


def test_a_host_that_comes_when_all_are_there_is_told_what_may_be_wrong(callers):
    place = store()
    made = NodeLinks(Nodes(0, 2, place), 2)
    calling = callers.submit(call_rank_0, Nodes(1, 2, place), 1, 2)
    assert [rank for rank, _ in made.accept()] == [1]
    calling.result(SOON_S)
    with pytest.raises(DeadlineError, match=r"it already has all its hosts, one with this `nodes.rank`"):
        call_rank_0(Nodes(1, 2, place), 1, 2)


def test_a_second_host_0_does_not_take_the_first_ones_place():
    """On another machine it can listen at that port and then finds the first one's store."""
    place = store()
    first = NodeLinks(Nodes(0, 2, place), 2)
    with pytest.raises(ConfigError, match=r"another host 0 is at `nodes.store` 127\.0\.0\.1"):
        NodeLinks(Nodes(0, 2, replace(place, is_own=False)), 2)
    del first


def test_an_address_that_is_no_name_is_refused_after_a_while(monkeypatch, caplog):
    monkeypatch.setattr(group_store, "NAME_POLL_S", 0.01)
    nowhere = GroupStore("no-such-host.invalid:8290", "nodes.store")
    with pytest.raises(ConfigError, match=r"`nodes.store` no-such-host.invalid:8290 can't be resolved"):
        nowhere.open(is_first=False, timeout_s=0.05)
    assert caplog.text.count("can't be resolved") == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_with_tls_a_host_has_to_be_known(callers, tmp_path, is_known):
    authority = Authority()
    other = authority if is_known else Authority()
    place = replace(store(), identity=authority.identity(tmp_path, "server"))
    (tmp_path / "other").mkdir()
    theirs = replace(place, identity=other.identity(tmp_path / "other", "server", trusts=authority))
    links = NodeLinks(Nodes(0, 2, place), 2)
    calling = callers.submit(call_rank_0, Nodes(1, 2, theirs), 1, 2)
    if not is_known:
        with pytest.raises(DeadlineError, match=r"`nodes.store` .* is not answered|could not be reached"):
            calling.result(SOON_S)
        return
    ((rank, ours),) = links.accept()
    calling.result(SOON_S).send(RankLeaves())
    assert (rank, ours.receive(RankLeaves)) == (1, RankLeaves())
