"""How many servers a load asks for."""

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.cost.goodput import late_probability
from twinfang.autoscale.histogram import Histogram
from twinfang.autoscale.needs import (
    MAX_BUSY,
    Objectives,
    decode_need,
    prefill_need,
)
from twinfang.autoscale.pool_planner import (
    SLACK,
    Needs,
    PlannerPace,
    PoolHistory,
    PoolLimits,
    PoolSize,
    decide,
)
from twinfang.autoscale.readings import DecodeReading, PrefillReading, RouterReading
from twinfang.autoscale.step_line import TpotPoint, tpot_rows

GOALS = Objectives(ttft_s=0.5, tpot_s=0.025, queue_s=0.2)
BOUNDS = tuple(0.01 * 1.3**i for i in range(30))
QUIET = RouterReading(Histogram(), Histogram(), Histogram())


def observed(*values):
    cumulative = {bound: float(sum(value <= bound for value in values)) for bound in (*BOUNDS, math.inf)}
    return Histogram.of(cumulative, sum(values))


def prefill(busy, *, run_s=0.1, servers=4, **changes):
    fields = {"waiting": 0.0, "service": observed(*[run_s] * 50), "queue": observed(0.0)}
    return PrefillReading(servers, busy, prompt_s=run_s, **(fields | changes))


def decode(running, *, servers=4, **changes):
    fields = {"waiting": 0.0, "max_rows": 64.0, "used_blocks": 0.1, "batch_rows": 1.0, "queue": observed(0.0)}
    return DecodeReading(servers, running, **(fields | changes))


@given(st.floats(0, 40), st.floats(0.01, 0.6), st.floats(1, 3))
def test_more_prompts_need_no_fewer_servers(busy, run_s, growth):
    less = prefill_need(prefill(busy, run_s=run_s), QUIET, GOALS).num_servers
    assert less >= busy / MAX_BUSY - 1e-9
    assert prefill_need(prefill(busy, run_s=run_s), QUIET, GOALS, growth=growth).num_servers >= less
    assert prefill_need(prefill(busy * growth, run_s=run_s), QUIET, GOALS).num_servers >= less


@given(st.floats(0.1, 30), st.floats(0.02, 0.4))
def test_prompts_meet_the_objectives_with_what_is_needed_and_not_with_less(busy, run_s):
    num = prefill_need(prefill(busy, run_s=run_s), QUIET, GOALS).num_servers

    def late(servers):
        share = busy / servers
        wait_s = share / (1 - share) * run_s / 2 if share < 1 else math.inf
        rests = (GOALS.ttft_s - run_s, GOALS.queue_s)
        return max(late_probability(share, wait_s, rest) for rest in rests)

    assert late(num) <= 0.1 + 1e-6
    if num > 1:
        assert late(num - 1) > 0.1 - 1e-6 or busy / (num - 1) > MAX_BUSY


def test_prompts_that_are_late_even_alone_ask_for_no_servers_and_are_told_of():
    need = prefill_need(prefill(0.2, run_s=0.8), QUIET, GOALS)
    assert need.num_servers <= 2
    assert "longer than the TTFT objective even alone" in need.why


def test_prompts_that_wait_are_worked_off():
    few = prefill_need(prefill(3.0), QUIET, GOALS).num_servers
    many = prefill_need(prefill(3.0, waiting=1200.0), QUIET, GOALS).num_servers
    assert many >= few + 4


def test_waits_that_are_measured_ask_for_more_whatever_arithmetic_says():
    waiting = prefill(0.5, queue=observed(*[0.4] * 50))
    need = prefill_need(waiting, QUIET, GOALS)
    assert (need.num_servers, "on prefill servers" in need.why) == (5, True)
    slow = RouterReading(Histogram(), Histogram(), observed(*[0.4] * 50))
    assert "in routers" in prefill_need(prefill(0.5), slow, GOALS).why
    full = RouterReading(Histogram(), Histogram(), observed(*[0.4] * 50), places_taken=1.0)
    assert prefill_need(prefill(0.5), full, GOALS).num_servers == 1, "they wait for decode servers"


@given(st.floats(0, 500), st.floats(1, 3), st.lists(st.tuples(st.floats(1, 64), st.floats(0.001, 0.1))))
@example(5e-324, 1.0, [])
@example(1e-310, 3.0, [(1.0, 0.001), (64.0, 0.1)])
def test_more_requests_need_no_fewer_decode_servers(running, growth, points):
    seen = [TpotPoint(*point) for point in points]
    less = decode_need(decode(running), QUIET, GOALS, seen).num_servers
    assert decode_need(decode(running), QUIET, GOALS, seen, growth=growth).num_servers >= less
    assert decode_need(decode(running, waiting=50.0), QUIET, GOALS, seen).num_servers >= less


def test_decode_servers_are_bound_by_rows_blocks_or_tpot():
    fast = [TpotPoint(20.0, 0.005)]
    rows = decode_need(decode(200.0), QUIET, GOALS, fast)
    assert (rows.num_servers, "--max-num-seqs" in rows.why) == (4, True)
    blocks = decode_need(decode(200.0, used_blocks=0.9), QUIET, GOALS, fast)
    assert blocks.num_servers > 4
    assert "KV blocks" in blocks.why
    slow = decode_need(decode(200.0), QUIET, GOALS, [TpotPoint(50.0, 0.05)])
    assert slow.num_servers > 8
    assert "TPOT" in slow.why


def test_requests_in_routers_count_where_decode_servers_are_full():
    full = RouterReading(Histogram(), Histogram(), Histogram(), num_queued=200.0, places_taken=1.0)
    some = RouterReading(Histogram(), Histogram(), Histogram(), num_queued=200.0, places_taken=0.3)
    assert decode_need(decode(200.0), full, GOALS, []).num_servers == 8
    assert decode_need(decode(200.0), some, GOALS, []).num_servers == 4


def test_no_load_needs_one_server():
    idle = prefill(0.0, service=Histogram())
    assert prefill_need(idle, QUIET, GOALS).num_servers == 1
    assert decode_need(decode(0.0), QUIET, GOALS, []).num_servers == 1


@given(
    st.floats(0.001, 0.02),
    st.floats(0.00001, 0.003),
    st.lists(st.floats(1, 64), min_size=1, max_size=10),
)
def test_the_rows_that_tpot_allows_lie_between_what_was_met_and_what_was_missed(fixed_s, row_s, rows):
    """Of steps that take a fixed part and one for each row."""
    points = [TpotPoint(one, fixed_s + row_s * one) for one in rows]
    allowed = tpot_rows(GOALS.tpot_s, points)
    truth = (GOALS.tpot_s - fixed_s) / row_s
    for point in points:
        bound = point.rows * GOALS.tpot_s / point.tpot_s
        if point.tpot_s <= GOALS.tpot_s:
            assert allowed >= bound - 1e-6
            assert bound <= truth + 1e-6
        else:
            assert allowed <= max(0.5, bound) + 1e-6
            assert bound >= truth - 1e-6


class Day:
    """A load that rises and falls, and pools whose new servers take four minutes to serve."""

    run_s, answer_tokens, fixed_s, row_s, max_rows = 0.1, 200, 0.006, 0.00025, 64
    starts_s = 240.0

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.sizes = {"prefill": 1, "decode": 1}
        self.asked = {"prefill": [], "decode": []}
        self.histories = {"prefill": PoolHistory(), "decode": PoolHistory()}
        self.num_changes = 0
        self.seen = []

    def serving(self, role, now_s):
        pending = [num for asked_s, num in self.asked[role] if now_s < asked_s + self.starts_s]
        return min([self.sizes[role], *pending])

    def decode_rows(self, per_s, servers):
        """Of one server, where requests come and go: Little's law on a step that takes longer by each row."""
        rate = per_s / servers * self.answer_tokens
        rows = rate * self.fixed_s / (1 - rate * self.row_s) if rate * self.row_s < 0.9 else math.inf
        return min(rows, self.max_rows)

    def look(self, now_s):
        per_s = (30 + 25 * math.sin(2 * math.pi * now_s / 86400)) * self.rng.uniform(0.9, 1.1)
        prefills, decodes = self.serving("prefill", now_s), self.serving("decode", now_s)
        busy = min(prefills, per_s * self.run_s)
        rows = self.decode_rows(per_s, decodes)
        tpot_s = self.fixed_s + self.row_s * rows
        self.seen.append(TpotPoint(max(1.0, rows), tpot_s))
        loads = {
            "prefill": lambda growth: prefill_need(
                prefill(busy, run_s=self.run_s, servers=prefills), QUIET, GOALS, growth=growth
            ),
            "decode": lambda growth: decode_need(
                decode(rows * decodes, servers=decodes), QUIET, GOALS, self.seen[-240:], growth=growth
            ),
        }
        for role, need in loads.items():
            self.plan(role, need, now_s)
        return per_s * self.run_s / prefills, tpot_s

    def plan(self, role, need, now_s):
        now = need(1.0)
        size = PoolSize(self.sizes[role], self.serving(role, now_s))
        decision, self.histories[role] = decide(
            now_s,
            size,
            Needs(now.num_servers, need(SLACK).num_servers, now.why),
            PoolLimits(1, 20),
            PlannerPace(60.0, 300.0),
            self.histories[role],
        )
        if decision.num_servers != size.wanted:
            self.num_changes += 1
            self.asked[role].append((now_s, size.serving))
            self.sizes[role] = decision.num_servers


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_day_s_load_is_followed_with_few_changes_and_few_late_answers(seed):
    day = Day(seed)
    looks = [day.look(60.0 * i) for i in range(1440)][20:]  # it begins with one server each
    assert sum(busy > MAX_BUSY for busy, _ in looks) / len(looks) < 0.02
    assert sum(tpot_s > GOALS.tpot_s for _, tpot_s in looks) / len(looks) < 0.02
    assert day.num_changes < 40
    assert max(day.sizes.values()) <= 20
