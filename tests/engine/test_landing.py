"""Rows that are handled together after a step, beside the general way, which handles one row at a time."""

from __future__ import annotations

import random

import numpy as np

from engine.landing import divide
from engine.request import Request, StateBoundary
from engine.row_kinds import PlannedRow
from engine.stats import EngineStats
from engine.step.launched_step import RowResults
from engine.step_result import Landed
from wire.messages.sampling_params import SamplingParams

STOP = 9


def decoding(name: str, *, quiet_until: int = 100) -> Request:
    """A request with a prompt of 4 tokens and one token of its answer, and one step in flight."""
    request = Request(name, [1, 2, 3, 4], SamplingParams(max_tokens=50), stop_token_ids=frozenset([STOP]))
    request.tokens.append(5)
    request.num_computed, request.num_planned, request.num_in_flight = 4, 5, 1
    request.quiet_until = quiet_until
    return request


def test_only_rows_that_gain_tokens_and_nothing_else_are_quiet():
    kept = (StateBoundary(6, 3),)
    cases = {
        "quiet": (decoding("quiet"), (), (1, 1, 0, 7)),
        "at its end": (decoding("at its end", quiet_until=4), (), (1, 1, 0, 7)),
        "stops": (decoding("stops"), (), (1, 1, 0, STOP)),
        "keeps a state": (decoding("keeps a state"), kept, (1, 1, 0, 7)),
        "not finite": (decoding("not finite"), (), (1, 0, 0, 7)),
        "ended before": (decoding("ended before", quiet_until=-1), (), (0, 0, 0, 0)),
    }
    cases["ended before"][0].finish_reason = "stop"
    rows = [PlannedRow(request, 4, 1, boundaries) for request, boundaries, _ in cases.values()]
    quiet, others = divide(
        rows, RowResults.of([np.array([result for *_, result in cases.values()])], {}, None)
    )
    assert [request.request_id for request in quiet.requests] == ["quiet"]
    names = [row.request.request_id for row, _ in others]
    assert names == [
        "at its end",
        "stops",
        "keeps a state",
        "not finite",
    ]
    assert [result.tokens for _, result in others] == [(7,), (STOP,), (7,), (7,)]
    gained = {name: request.tokens[5:] for name, (request, _, _) in cases.items()}
    assert gained["quiet"] == [7]
    assert gained["stops"] == [STOP]
    assert gained["not finite"] == gained["ended before"] == []


def test_quiet_rows_are_counted_as_one_by_one():
    luck = random.Random(5)
    requests = [decoding(f"r{i}") for i in range(40)]
    tried = [luck.randint(0, 3) for _ in requests]
    results = [[1 + luck.randint(0, n), 1, n, *luck.choices(range(9), k=4)] for n in tried]
    rows = [PlannedRow(request, 4, 1) for request in requests]
    found = RowResults.of([np.array(results)], {}, None)
    quiet, others = divide(rows, found)
    assert not others
    together, landed = EngineStats(3), Landed()
    previous = quiet.land(2.5, together, landed)
    counted = [(request.measured.num_drafted, request.measured.num_accepted) for request in requests]
    alone, ones = EngineStats(3), [decoding(f"r{i}") for i in range(40)]
    for request, result in zip(ones, found, strict=True):
        alone.count(PlannedRow(request, 5, 1), result)
    assert vars(together) == vars(alone)
    assert counted == [(request.measured.num_drafted, request.measured.num_accepted) for request in ones]
    assert [count for _, count in previous] == [result[0] for result in results]
    outputs = landed.outputs.take().token_ids
    for request, (count, _, _, *tokens) in zip(requests, results, strict=True):
        assert request.num_computed == request.num_planned == 4 + count
        assert request.num_in_flight == 0
        assert request.memory.state_index == count - 1
        assert outputs[request.request_id] == tuple(tokens[:count]) == tuple(request.tokens[5:])


def test_a_burst_is_landed_like_its_steps_one_by_one():
    luck = random.Random(6)

    def step():
        tried = [luck.randint(0, 3) for _ in range(20)]
        return np.array([[1 + luck.randint(0, n), 1, n, *luck.choices(range(9), k=4)] for n in tried])

    steps = [step() for _ in range(4)]
    together, one_by_one = EngineStats(3), EngineStats(3)
    burst, single = ([decoding(f"r{i}") for i in range(20)] for _ in range(2))
    for request in burst:
        request.num_in_flight, request.num_planned = 4, 8
    landed = [Landed(), Landed()]
    quiet, others = divide([PlannedRow(request, 4, 1) for request in burst], RowResults.of(steps, {}, None))
    assert not others
    quiet.land(2.5, together, landed[0])
    for results in steps:
        for request in single:
            request.num_in_flight, request.num_planned = 1, request.num_computed + 1
        quiet, others = divide([PlannedRow(one, 4, 1) for one in single], RowResults.of([results], {}, None))
        quiet.land(2.5, one_by_one, landed[1])
    assert vars(together) == vars(one_by_one)
    assert landed[0].outputs.take() == landed[1].outputs.take()
    for one, other in zip(burst, single, strict=True):
        assert one.tokens == other.tokens
        assert one.measured.num_drafted == other.measured.num_drafted
        assert one.measured.num_accepted == other.measured.num_accepted
        assert one.num_computed == other.num_computed == one.num_planned
        assert one.num_in_flight == 0
        assert one.memory.state_index == other.memory.state_index


def test_the_newest_state_of_a_row_that_ended_in_a_burst_is_where_its_last_token_was():
    steps = [np.array([[accepted, 1, 3, 7, 7, 7, 7]]) for accepted in (2, 4, 3, 0, 0)]
    (result,) = RowResults.of(steps, {}, None)
    assert (result.accepted, result.newest, len(result.tokens)) == (9, 3, 9)
