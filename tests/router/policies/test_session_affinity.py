"""A session stays at its server as long as the server is available."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.policies.policy import Candidate, Demand
from router.policies.round_robin import RoundRobin
from router.policies.session_affinity import SessionAffinity

SESSIONS = [f"user-{i}" for i in range(2000)]


def placed(candidates, sessions=SESSIONS) -> dict[str, str]:
    policy = SessionAffinity(RoundRobin())  # made anew: what another router would choose
    chosen = {}
    for session in sessions:
        decision = policy.choose(candidates, Demand(session=session))
        assert decision.policy == "session_affinity"
        chosen[session] = decision.candidate.address
    return chosen


def servers(num: int) -> list[Candidate]:
    return [Candidate(f"10.0.0.{i}:8200") for i in range(num)]


def test_sessions_are_spread_evenly():
    counts = Counter(placed(servers(5)).values())
    assert len(counts) == 5
    assert max(counts.values()) < 1.25 * min(counts.values())


@given(st.integers(2, 8), st.data())
def test_a_server_that_leaves_moves_its_own_sessions_alone(num, data):
    candidates = servers(num)
    left = data.draw(st.sampled_from(candidates))
    sessions = SESSIONS[:200]
    before = placed(candidates, sessions)
    after = placed([one for one in candidates if one is not left], sessions)
    assert all(after[s] == before[s] for s in sessions if before[s] != left.address)
    assert placed(candidates, sessions) == before, "and they come back with it"


def test_a_server_that_joins_takes_its_share_from_all_and_nothing_else_moves():
    before, after = placed(servers(4)), placed(servers(5))
    moved = [session for session in SESSIONS if after[session] != before[session]]
    assert {after[session] for session in moved} == {"10.0.0.4:8200"}
    assert 0.15 < len(moved) / len(SESSIONS) < 0.25
    assert len({before[session] for session in moved}) == 4


@given(st.permutations(servers(5)), st.text())
def test_the_order_of_candidates_does_not_matter(candidates, session):
    assert placed(candidates, [session]) == placed(servers(5), [session])


def test_requests_without_a_session_follow_the_other_policy():
    policy, candidates = SessionAffinity(RoundRobin(first_turn=0)), servers(3)
    decisions = [policy.choose(candidates, Demand()) for _ in range(3)]
    assert [one.candidate for one in decisions] == candidates
    assert {one.policy for one in decisions} == {"round_robin"}
