"""Balance, herds (routers that choose the same server), servers that come and go. By simulation."""

from __future__ import annotations

import random
from collections import Counter
from statistics import quantiles

import pytest

from router.policies.least_loaded import LeastLoaded, weight
from router.policies.location import NOWHERE, Location
from router.policies.policy import Candidate, Decision, Demand, Load
from router.policies.prefix_affinity import PrefixAffinity
from router.policies.round_robin import RoundRobin
from testing.simulation.policies import SimulatedServer, Simulation


class LeastOfAll:
    """What least_loaded is not: it looks at every server."""

    reads_load = True

    def choose(self, candidates, demand):
        best = min(candidates, key=lambda one: weight(one.load, len(demand.token_ids)))
        return Decision(best, "least_of_all")


def long_and_short(rng: random.Random) -> Demand:
    """Nine prompts of ten are short, the tenth is forty times as long."""
    return Demand((0,) * (4000 if rng.random() < 0.1 else 100))


def simulated(make_policy=LeastLoaded, *, load=0.8, seconds=60.0, demand=long_and_short, **settings):
    """At ``load`` times what the servers can compute."""
    simulation = Simulation(make_policy, **settings)
    mean_tokens = 0.9 * 100 + 0.1 * 4000
    capacity = sum(server.tokens_per_s for server in simulation.servers.values())
    simulation.arrivals(per_s=load * capacity / mean_tokens, seconds=seconds, demand=demand)
    simulation.run(seconds)
    return simulation


def p99(values):
    return quantiles(values, n=100)[98]


@pytest.mark.parametrize("seed", range(3))
def test_prompts_of_uneven_length_wait_less_than_in_turn(seed):
    in_turn = simulated(lambda _rng: RoundRobin(first_turn=0), seed=seed)
    drawn = simulated(seed=seed)
    assert p99(drawn.waits_s) < 0.5 * p99(in_turn.waits_s)


def test_without_any_figures_a_router_balances_what_it_sends_itself():
    drawn = simulated(figures_every_s=None)
    assert p99(drawn.waits_s) < 0.5 * p99(simulated(lambda _rng: RoundRobin(first_turn=0)).waits_s)


@pytest.mark.parametrize("seed", [0])
def test_many_routers_with_stale_figures_do_not_herd(seed):
    """Each of 128 sends about one request before it hears again what the others have sent."""
    settings = {"num_servers": 8, "num_routers": 128, "figures_every_s": 1.0, "seed": seed, "seconds": 10}
    same = {"demand": lambda _rng: Demand((0,) * 490)}
    herd, drawn = simulated(lambda _rng: LeastOfAll(), **settings, **same), simulated(**settings, **same)
    assert drawn.fullest < 0.5 * herd.fullest
    assert p99(drawn.waits_s) < 0.5 * p99(herd.waits_s)


def test_a_slow_server_gets_less():
    simulation = Simulation(LeastLoaded)
    slow = simulation.servers["server-0:1"]
    slow.tokens_per_s /= 4
    simulation.arrivals(per_s=0.8 * 32_500 / 490, seconds=60, demand=long_and_short)
    simulation.run(60)
    others = [server.num_tokens for server in simulation.servers.values() if server is not slow]
    assert slow.num_tokens < 0.5 * min(others)
    assert max(others) < 1.2 * min(others)


def test_a_server_that_joins_gets_its_share_and_is_not_flooded():
    simulation = simulated(load=1.0, seconds=20)
    simulation.join(SimulatedServer("new:1"))
    before = simulation.prompts()
    simulation.arrivals(per_s=1.0 * 40_000 / 490, seconds=20, demand=long_and_short)
    simulation.run(40)
    gained = simulation.prompts() - before
    share = gained["new:1"] / gained.total()
    assert 0.15 < share < 0.42, "it is in two of five draws, and wins them only while it is emptier"


def test_a_server_that_drains_gets_nothing_and_the_others_share_its_part():
    simulation = simulated(load=0.5, seconds=20)
    drained = simulation.leave("server-0:1")
    had, before = drained.num_prompts, simulation.prompts()
    simulation.arrivals(per_s=0.5 * 40_000 / 490, seconds=20, demand=long_and_short)
    simulation.run(40)
    gained = simulation.prompts() - before
    assert drained.num_prompts == had
    assert max(gained.values()) < 1.3 * min(gained.values())
    simulation.join(drained)
    simulation.arrivals(per_s=0.5 * 40_000 / 490, seconds=20, demand=long_and_short)
    simulation.run(60)
    assert drained.num_prompts > had


def choice(*loads: Load, num_tokens: int = 100) -> int:
    candidates = [Candidate(str(i), load) for i, load in enumerate(loads)]
    decision = LeastLoaded(random.Random(0)).choose(candidates, Demand((0,) * num_tokens))
    assert decision.policy == "least_loaded"
    return candidates.index(decision.candidate)


def test_queues_count_first_then_room():
    empty, full = Load(0, 1000, 1000), Load(0, 200, 1000)
    assert choice(full, empty) == 1
    assert choice(Load(50, 1000, 1000), full) == 1
    assert choice(Load(20, 1000, 1000), Load(0, 50, 1000)) == 0, "50 of 100 tokens would wait for blocks"
    assert choice(Load(0, 400, 1000), Load(0, 800, 4000)) == 0, "the larger one is fuller"


def test_servers_that_are_equal_share_evenly():
    policy = LeastLoaded(random.Random(0))
    candidates = [Candidate(str(i)) for i in range(4)]
    chosen = [policy.choose(candidates, Demand()).candidate.address for _ in range(4000)]
    assert all(900 < chosen.count(one.address) < 1100 for one in candidates)


def test_a_single_server_is_chosen():
    assert choice(Load(10_000, -5, 10)) == 0


FAR, NEAR = 3, 1


def chosen_of(policy, candidates, times=200):
    decisions = (policy.choose(candidates, Demand((0,) * 100)) for _ in range(times))
    return Counter(decision.candidate.address for decision in decisions)


@pytest.mark.parametrize("make_policy", [LeastLoaded, PrefixAffinity])
def test_a_near_server_is_taken_while_no_more_waits_there(make_policy):
    idle, emptier = Load(0, 500, 1000), Load(0, 900, 1000)
    far = [Candidate(f"far-{i}", emptier, distance=FAR) for i in range(10)]
    near = [Candidate(f"near-{i}", idle, distance=NEAR) for i in range(2)]
    taken = chosen_of(make_policy(random.Random(0)), [*far, *near])
    assert set(taken) == {"near-0", "near-1"}, "however many others there are"
    assert min(taken.values()) > 60, "and evenly"
    busy = [Candidate(one.address, Load(1, 900, 1000), distance=NEAR) for one in near]
    taken = chosen_of(make_policy(random.Random(0)), [*far, *busy])
    assert sum(n for address, n in taken.items() if address.startswith("near")) < 20, "only if both drawn are"


def test_what_is_cached_counts_before_the_distance_and_then_the_distance_counts():
    policy, load = PrefixAffinity(random.Random(0)), Load(0, 1000, 1000)
    cold = [Candidate(f"cold-{i}", load, 0, NEAR) for i in range(5)]
    holders = [Candidate("far", load, 64, FAR), Candidate("near", load, 64, NEAR + 1)]
    assert set(chosen_of(policy, [*cold, *holders])) == {"near"}


def test_locations_share_a_node_a_rack_a_zone_or_nothing_that_is_known():
    here = Location("n1", "r1", "z1")
    others = [here, Location("n2", "r1", "z1"), Location("n3", "r2", "z1"), Location("n4", "r3", "z2")]
    assert [here.distance(other) for other in others] == [0, 1, 2, 3]
    assert NOWHERE.distance(NOWHERE) == here.distance(NOWHERE) == 3
    assert Location(zone="z1").distance(here) == 2
