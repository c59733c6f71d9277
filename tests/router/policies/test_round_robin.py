from hypothesis import given
from hypothesis import strategies as st

from router.policies.policy import Candidate, Demand
from router.policies.round_robin import RoundRobin


@given(st.integers(1, 9), st.integers(1, 5))
def test_every_candidate_gets_the_same_number_of_requests(num_candidates, num_rounds):
    policy, candidates = RoundRobin(), [Candidate(f"s{i}") for i in range(num_candidates)]
    chosen = [policy.choose(candidates, Demand()).candidate for _ in range(num_rounds * num_candidates)]
    assert sorted(chosen, key=repr) == sorted(candidates * num_rounds, key=repr)


def test_routers_that_start_together_begin_with_different_servers():
    candidates = [Candidate(f"s{i}") for i in range(4)]
    firsts = {RoundRobin().choose(candidates, Demand()).candidate.address for _ in range(200)}
    assert len(firsts) == 4


@given(st.lists(st.lists(st.text(), min_size=1, max_size=4), min_size=1))
def test_only_candidates_of_the_moment_are_chosen(rounds):
    policy = RoundRobin()
    for names in rounds:
        candidates = [Candidate(name) for name in names]
        assert policy.choose(candidates, Demand()).candidate in candidates
