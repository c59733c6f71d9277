"""Prompts with shared beginnings: how much is computed again, and whether load stays even. By simulation."""

from __future__ import annotations

import random
from functools import partial
from statistics import fmean

import pytest

from router.policies.least_loaded import LeastLoaded
from router.policies.policy import Candidate, Demand, Load
from router.policies.prefix_affinity import PrefixAffinity
from router.policies.round_robin import RoundRobin
from testing.simulation.policies import SimulatedServer, Simulation

NUM_PREFIXES = 24
PREFIX = {i: tuple(random.Random(i).randrange(1000) for _ in range(1024)) for i in range(NUM_PREFIXES)}


def one_of(num: int, rng: random.Random) -> Demand:
    """One of so many beginnings of 1,024 tokens, and 128 tokens of its own."""
    own = tuple(rng.randrange(1000) for _ in range(128))
    return Demand(PREFIX[rng.randrange(num)] + own)


def simulated(make_policy, *, num_prefixes=NUM_PREFIXES, per_s=30.0, seconds=30.0, **settings):
    """Each server has room for about eight of the 24 prefixes, and all together for 32."""
    simulation = Simulation(make_policy, cache_blocks=8 * 18, **settings)
    simulation.arrivals(per_s=per_s, seconds=seconds, demand=partial(one_of, num_prefixes))
    simulation.run(seconds)
    return simulation


def in_turn(_rng: random.Random) -> RoundRobin:
    return RoundRobin(first_turn=0)


@pytest.mark.parametrize("seed", range(2))
def test_more_is_found_in_caches_than_in_turn_or_by_load(seed):
    affine = simulated(PrefixAffinity, seed=seed)
    for others in (in_turn, LeastLoaded):
        other = simulated(others, seed=seed)
        assert affine.hit_rate > 1.8 * other.hit_rate
        assert fmean(affine.waits_s) < 0.5 * fmean(other.waits_s)
    assert affine.hit_rate > 0.7


def test_a_prefix_that_all_ask_for_does_not_stay_at_one_server():
    """One server alone would be asked for 1.3 times what it can compute."""
    per_s = 1.3 * 10_000 / (128 + 64)
    affine = simulated(PrefixAffinity, num_prefixes=1, per_s=per_s)
    assert affine.hit_rate > 0.8
    assert min(affine.prompts().values()) > 0.1 * affine.prompts().total()
    assert max(affine.waits_s) < 0.5


def test_many_routers_with_stale_figures_do_not_herd():
    settings = {"num_routers": 32, "figures_every_s": 1.0}
    affine, by_load = simulated(PrefixAffinity, **settings), simulated(LeastLoaded, **settings)
    assert affine.hit_rate > 1.5 * by_load.hit_rate
    assert affine.fullest < 1.5 * by_load.fullest


def test_prefixes_of_a_server_that_left_are_computed_elsewhere_and_one_that_joins_gets_work():
    simulation = simulated(PrefixAffinity)
    left = simulation.leave("server-0:1")
    had, before = left.num_prompts, simulation.prompts()
    simulation.arrivals(per_s=20, seconds=20, demand=partial(one_of, NUM_PREFIXES))
    simulation.run(50)
    gained = simulation.prompts() - before
    assert left.num_prompts == had
    assert min(gained.values()) > 0.15 * gained.total()
    simulation.join(SimulatedServer("new:1", cache_blocks=8 * 18))
    simulation.arrivals(per_s=30, seconds=20, demand=partial(one_of, NUM_PREFIXES))
    simulation.run(70)
    assert simulation.servers["new:1"].num_prompts > 0.05 * 30 * 20


def choice(*candidates: Candidate, num_tokens: int = 1000, session: str = "") -> tuple[str, str]:
    policy = PrefixAffinity(random.Random(0))
    decision = policy.choose(candidates, Demand((0,) * num_tokens, session_name=session))
    return decision.candidate.address, decision.policy


def test_a_queue_longer_than_what_is_saved_is_not_worth_it():
    idle = Candidate("idle", Load(0, 10_000, 10_000))
    for queued, chosen in ((600, "holder"), (800, "idle")):
        holder = Candidate("holder", Load(queued, 10_000, 10_000), cached_tokens=700)
        assert choice(holder, idle)[0] == chosen


def test_without_a_hit_it_is_least_loaded():
    assert choice(Candidate("a", Load(10)), Candidate("b", Load(5))) == ("b", "least_loaded")


def test_the_longest_prefix_wins_among_equal_loads():
    short, long = Candidate("short", cached_tokens=100), Candidate("long", cached_tokens=600)
    assert choice(short, long, Candidate("none")) == ("long", "prefix_affinity")


SESSIONS = [f"{number:032x}" for number in range(60)]


def test_sessions_have_homes_on_all_idle_servers():
    servers = [Candidate(name) for name in "abc"]
    homes = {session: choice(*servers, session=session) for session in SESSIONS}
    assert {policy for _, policy in homes.values()} == {"session_affinity"}
    assert all(sum(home == name for home, _ in homes.values()) >= 10 for name in "abc")
    fewer = {session: choice(*servers[:2], session=session)[0] for session in SESSIONS}
    assert all(fewer[session] == home for session, (home, _) in homes.items() if home != "c")


@pytest.mark.parametrize(("queued", "stays"), [(500, True), (520, False)])
def test_a_home_with_more_to_do_than_it_can_save_is_left(queued, stays):
    (home, _) = choice(Candidate("a"), Candidate("b"), session=SESSIONS[0])
    busy = [Candidate(name, Load(queued * (name == home), 10_000, 10_000)) for name in "ab"]
    assert (choice(*busy, session=SESSIONS[0])[0] == home) is stays


def test_what_a_server_has_cached_counts_more_than_being_a_home():
    (home, _) = choice(Candidate("a"), Candidate("b"), session=SESSIONS[0])
    servers = [Candidate(name, cached_tokens=0 if name == home else 600) for name in "ab"]
    assert choice(*servers, session=SESSIONS[0]) == ({"a": "b", "b": "a"}[home], "prefix_affinity")
    servers = [Candidate(name, cached_tokens=0 if name == home else 100) for name in "ab"]
    assert choice(*servers, session=SESSIONS[0]) == (home, "session_affinity")
