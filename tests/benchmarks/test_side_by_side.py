"""Of the benchmark beside other servers: whose turn it is, what rounds come to, what may be published."""

from __future__ import annotations

import queue

import pytest

from benchmarks.side_by_side import publication
from benchmarks.side_by_side.generate_server import Job, gather
from benchmarks.side_by_side.options import ARRANGEMENTS
from benchmarks.side_by_side.plan import num_requests, visits
from benchmarks.side_by_side.report import answers_line, median_ratio, medians, pairs_table, section, table
from testing.checkpoints.random_model import LARGE, MODELS, SMALL


def measurement(arrangement, number, tokens_per_s, *, ttft=10.0, concurrency=8):
    return {
        "model": SMALL.name,
        "arrangement": arrangement,
        "round": number,
        "concurrency": concurrency,
        "output_tokens_per_s": tokens_per_s,
        "ttft_ms": {"p50": ttft, "p99": 99.0},
        "tpot_ms": {"p50": 2.0, "p99": 99.0},
        "cores": {"other_cores": 0.04},
    }


MEASUREMENTS = [
    measurement(name, number, tokens_per_s)
    for number, rates in enumerate([(300.0, 100.0), (150.0, 60.0), (400.0, 100.0)])
    for name, tokens_per_s in zip(("up", "vllm"), rates, strict=True)
]


@pytest.fixture
def report():
    """Of a run in which nothing was left out."""
    return {
        "machine": {"processor": "A processor"},
        "versions": {"torch": "1.2.3"},
        "settings": {"rounds": 3, "scale": 1.0, "input_len": 256, "output_len": 128, "cores": 2},
        "models": {model.name: {"title": model.title} for model in MODELS.values()},
        "arrangements": {name: {"title": name.upper()} for name in ARRANGEMENTS},
        "medians": medians(MEASUREMENTS),
        "measurements": MEASUREMENTS,
        "answers": {SMALL.name: {"up": "abc", "vllm": "abc"}},
        "failures": [],
    }


def test_a_round_has_every_arrangement_once_a_model_and_another_one_begins_the_next_round():
    plan = visits([SMALL, LARGE], ARRANGEMENTS, rounds=3)
    assert len({(one.round, one.model.name, one.arrangement) for one in plan}) == len(plan) == 27
    assert [one.round for one in plan] == sorted(one.round for one in plan)
    first = [next(one.arrangement for one in plan if one.round == number) for number in range(3)]
    assert first == list(ARRANGEMENTS[:3])


def test_vllms_pair_is_measured_with_the_small_model_alone():
    plan = visits([SMALL, LARGE], ARRANGEMENTS, rounds=1)
    assert [one.model.name for one in plan if one.arrangement == "vllm-pair"] == [SMALL.name]


def test_a_small_scale_still_fills_what_shall_be_in_flight():
    assert [num_requests(SMALL, 8, scale) for scale in (0.01, 1.0, 2.0)] == [8, 32, 64]


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    up, vllm = medians(MEASUREMENTS)
    assert up["output_tokens_per_s"] == {
        "median": 300.0, "min": 150.0, "max": 400.0, "rounds": 3, "ratio_to_vllm": 3.0
    }  # fmt: skip
    assert vllm["output_tokens_per_s"]["ratio_to_vllm"] == 1.0


def test_rounds_without_the_yardstick_have_no_ratio():
    [alone] = medians([measurement("up", 0, 300.0)])
    assert alone["ttft_ms"]["ratio_to_vllm"] is None
    [up, _] = medians([measurement("up", 0, 300.0), measurement("up", 1, 90.0), measurement("vllm", 1, 30.0)])
    assert up["output_tokens_per_s"]["ratio_to_vllm"] == 3.0  # of round 1 alone


def test_the_table_has_medians_with_ratios_and_a_dash_for_what_is_missing(report):
    lines = table(report).splitlines()
    assert lines[0] == "| model | in flight |  | UP | SERVE | VLLM | VLLM-PAIR | TRANSFORMERS |"
    assert lines[2] == "| 2 M parameters | 8 | output tokens/s | 300.0 (3.00 ×) | – | 100.0 | – | – |"
    assert lines[3] == "|  |  | TTFT, ms | 10.0 (1.00 ×) | – | 10.0 | – | – |"
    assert len(lines) == 5


def test_our_pair_is_shown_in_multiples_of_vllms_pair(report):
    assert pairs_table(report) == ""
    theirs = [measurement("vllm-pair", number, rate, ttft=100.0) for number, rate in enumerate([50, 50, 40])]
    lines = pairs_table(report | {"measurements": MEASUREMENTS + theirs}).splitlines()
    assert lines[0] == "| UP ÷ VLLM-PAIR | in flight | output tokens/s | TTFT | TPOT |"
    assert lines[2:] == ["| 2 M parameters | 8 | 6.00 × | 0.10 × | 1.00 × |"]


def test_who_answers_differently_is_named(report):
    assert "the greedy answers were the same" in answers_line(report)
    line = answers_line(report | {"answers": {SMALL.name: {"up": "abc", "vllm": "abd"}}})
    assert "(2 M parameters: VLLM)" in line


def test_only_a_whole_run_is_published(report, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in (publication.PUBLISHED.parent, publication.PLOT.parent):
        folder.mkdir(parents=True)
    readme = f"before {publication.BEGIN} old {publication.END} after\n"
    publication.DOCUMENT.write_text(readme)
    for partial in ({"failures": ["one"]}, {"arrangements": {"up": {"title": "UP"}}}):
        publication.publish(report | partial)
        assert "stay as they are" in capsys.readouterr().out
        assert publication.DOCUMENT.read_text() == readme
    publication.publish(report)
    assert section(report) in publication.DOCUMENT.read_text()
    assert publication.PUBLISHED.exists()
    assert publication.PLOT.exists()


def test_what_generate_takes_into_one_batch_is_of_one_size():
    jobs = queue.SimpleQueue()
    first, alike, longer = (Job([1, 2], num_tokens, print) for num_tokens in (8, 8, 9))
    for job in (alike, longer):
        jobs.put(job)
    assert gather(jobs, first) == ([first, alike], longer)


def test_a_round_whose_tokens_came_all_at_once_has_no_ratio_of_times_between_tokens():
    ours = {1: {"tpot_ms": 2.0}, 2: {"tpot_ms": 3.0}}
    assert median_ratio(ours, {1: {"tpot_ms": 0.0}, 2: {"tpot_ms": 6.0}}, "tpot_ms") == 0.5
    assert median_ratio(ours, {1: {"tpot_ms": 0.0}}, "tpot_ms") is None
