from hypothesis import given
from hypothesis import strategies as st

from router.policies.round_robin import RoundRobin


@given(st.integers(1, 9), st.integers(1, 5))
def test_every_candidate_gets_the_same_number_of_requests(num_candidates, num_rounds):
    policy, candidates = RoundRobin(), list(range(num_candidates))
    chosen = [policy.choose(candidates) for _ in range(num_rounds * num_candidates)]
    assert sorted(chosen) == sorted(candidates * num_rounds)


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=4), min_size=1))
def test_only_candidates_of_the_moment_are_chosen(rounds):
    policy = RoundRobin()
    assert all(policy.choose(candidates) in candidates for candidates in rounds)
