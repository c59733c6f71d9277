"""Of the benchmark beside other servers: whose turn it is, what is left of a stopped run, what rounds come
to, what may be published."""

from __future__ import annotations

import queue
from itertools import product

import pytest

from benchmarks.json_file import read_json
from benchmarks.side_by_side import publication
from benchmarks.side_by_side.contenders.generate_server import Job, gather
from benchmarks.side_by_side.contenders.gguf import converter_config
from benchmarks.side_by_side.figures import BETTER, EQUAL, UNDECIDED, WORSE, Comparison, compare, medians
from benchmarks.side_by_side.limits import LIMITED, limit
from benchmarks.side_by_side.loads import DRAFTS, EVERYBODY, LOADS, NUM_REPETITIVE_PROMPTS, seed_of
from benchmarks.side_by_side.models import MODELS
from benchmarks.side_by_side.options import parse
from benchmarks.side_by_side.plan import expected_s, visits
from benchmarks.side_by_side.progress import BusyError, Progress, only_run_in
from benchmarks.side_by_side.tables import (
    answers_line,
    changes_table,
    limits_table,
    long_table,
    pairs_table,
    short_table,
    verdicts,
)
from engine.cost.step_size import StepSize
from engine.models import read_config

EVERYTHING = (list(MODELS), list(EVERYBODY), list(LOADS))


def measurement(contender, number, tokens_per_s, *, load="short", at=32, model="2m", ttft=10.0, **further):
    return {
        "model": model,
        "arrangement": contender,
        "round": number,
        "load": load,
        "at": at,
        "output_tokens_per_s": tokens_per_s,
        "ttft_ms": {"p50": ttft, "p99": 99.0},
        "tpot_ms": {"p50": 2.0, "p99": 99.0},
        "cores": {"other_cores": 0.04},
    } | further


MEASUREMENTS = [
    measurement(name, number, tokens_per_s)
    for number, rates in enumerate([(300.0, 100.0), (150.0, 60.0), (400.0, 100.0)])
    for name, tokens_per_s in zip(("up", "vllm"), rates, strict=True)
]


def report_of(measurements):
    """Returns the report of a run in which these are all measurements."""
    return {
        "machine": {"processor": "A processor"},
        "versions": {"torch": "1.2.3"},
        "settings": {"rounds": 3, "scale": 1.0, "cores": 2, "dtype": "float32"},
        "models": {name: {"title": model.title} for name, model in MODELS.items()},
        "loads": {name: load.about() for name, load in LOADS.items()},
        "arrangements": {name: {"title": name.upper()} for name in EVERYBODY},
        "medians": medians(measurements),
        "measurements": measurements,
        "answers": {"2m": {"UP": "abc", "VLLM": "abc"}},
        "failures": [],
    }


@pytest.fixture
def report():
    return report_of(MEASUREMENTS)


@pytest.fixture(scope="module")
def whole():
    """The report of a run in which nothing was left out."""
    found = []
    for visit in visits(*EVERYTHING, rounds=3):
        for point in visit.points:
            further = {"goodput_per_s": 8.0} if point.load.name == "open" else {}
            about = {"load": point.load.name, "at": point.at, "model": visit.model}
            found.append(measurement(visit.contender, visit.round, 50.0, **about, **further))
    return report_of(found)


# --- plan -----------------------------------------------------------------------------------------


def test_a_round_has_every_contender_once_a_model_and_another_one_begins_the_next_round():
    plan = visits(*EVERYTHING, rounds=3)
    assert len({(one.round, one.model, one.contender, one.variant) for one in plan}) == len(plan)
    assert [one.round for one in plan] == sorted(one.round for one in plan)
    first = [next(one.contender for one in plan if one.round == number) for number in range(3)]
    assert first == list(EVERYBODY[:3])


def test_a_visit_measures_only_the_loads_of_its_way_of_starting():
    for visit in visits(*EVERYTHING, rounds=1):
        assert visit.points
        assert {point.load.variant for point in visit.points} == {visit.variant}
    drafting = [one for one in visits(*EVERYTHING, rounds=1) if one.variant == DRAFTS]
    assert {(one.model, one.contender) for one in drafting} == set(
        product(["bundled"], ["up", "serve", "vllm"])
    )


def test_slow_contenders_get_the_first_load_only_and_vllms_pair_not_the_large_model():
    plan = visits(*EVERYTHING, rounds=1)
    slow = {one.contender: [] for one in plan if one.contender in ("vllm-pair", "transformers")}
    for visit in plan:
        if visit.contender in slow:
            slow[visit.contender].append((visit.model, {point.load.name for point in visit.points}))
    assert slow == {
        "vllm-pair": [("2m", {"short"})],
        "transformers": [("2m", {"short"}), ("120m", {"short"})],
    }


def test_a_small_scale_still_fills_what_shall_be_in_flight():
    load = LOADS["short"]
    assert [load.num_requests("2m", 8, scale) for scale in (0.01, 1.0, 2.0)] == [8, 32, 64]


def test_the_whole_run_is_planned_to_take_at_most_an_hour():
    assert expected_s(visits(*EVERYTHING, rounds=3)) <= 3600


def test_a_part_is_chosen_in_the_order_of_the_whole(capsys):
    options = parse(None, ["--only", "vllm,serve", "--loads", "open,short", "--models", "2m"])
    assert (options.only, options.loads, options.models) == (["serve", "vllm"], ["short", "open"], ["2m"])
    with pytest.raises(SystemExit):
        parse(None, ["--loads", "shrot"])
    assert "shrot: there are short, long" in capsys.readouterr().err


def prompts_of(directory, *loads):
    """Returns the prompts of measurements at 1 and 8 in flight."""
    return [
        load.workload(directory, seed_of(load, 0, at)).prompt(index)
        for load in loads
        for at in (1, 8)
        for index in range(8)
    ]


def test_no_two_measurements_of_a_contender_share_prompts(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    prompts = prompts_of(tmp_path, LOADS["prefix"])
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert {len(prompt) for prompt in prompts} == {1280}
    assert len({tuple(prompt[1024:1040]) for prompt in prompts}) == len(prompts)


def test_no_two_loads_share_the_beginnings_of_prompts(tmp_path):
    """A prefix cache would answer the second load faster than the first one."""
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    loads = [load for load in LOADS.values() if not (load.shared_len or load.is_repetitive)]
    beginnings = [tuple(prompt[:16]) for prompt in prompts_of(tmp_path, *loads)]
    assert len(loads) == 5
    assert len(set(beginnings)) == len(beginnings)


def test_loads_of_repetitive_text_have_the_same_prompts():
    plain, drafts = (seed_of(LOADS[name], 1, 8) for name in ("repetitive", "repetitive-drafts"))
    assert plain % NUM_REPETITIVE_PROMPTS == drafts % NUM_REPETITIVE_PROMPTS


# --- resumption -----------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_with_what_it_had_not_measured(tmp_path):
    plan = visits(["2m"], ["serve", "vllm"], ["short", "open"], rounds=2)
    progress = Progress.kept_in(tmp_path, {"source": "abc"})
    assert [progress.left(visit) for visit in plan] == [visit.points for visit in plan]
    progress.measurements += [
        measurement("serve", 0, 1.0, load=point.load.name, at=point.at) for point in plan[0].points[:2]
    ]
    progress.seconds = 12.0
    progress.write()

    again = Progress.kept_in(tmp_path, {"source": "abc"})
    assert again.left(plan[0]) == plan[0].points[2:]
    assert [again.left(visit) for visit in plan[1:]] == [visit.points for visit in plan[1:]]
    assert (again.measurements, again.seconds) == (progress.measurements, 12.0)
    assert read_json(again.file)["key"] == {"source": "abc"}


def test_other_code_or_versions_have_progress_of_their_own(tmp_path):
    [visit] = visits(["2m"], ["serve"], ["short"], rounds=1)
    progress = Progress.kept_in(tmp_path, {"source": "abc"})
    progress.measurements += [measurement("serve", 0, 1.0, at=point.at) for point in visit.points]
    progress.write()
    assert Progress.kept_in(tmp_path, {"source": "abd"}).left(visit) == visit.points
    assert Progress.kept_in(tmp_path, {"source": "abc"}).left(visit) == ()


def test_what_is_measured_anew_forgets_what_was(tmp_path):
    [visit] = visits(["2m"], ["serve"], ["short"], rounds=1)
    progress = Progress.kept_in(tmp_path, {})
    progress.measurements += [measurement("serve", 0, 1.0, at=point.at) for point in visit.points]
    progress.forget()
    assert progress.left(visit) == visit.points


def test_a_file_that_cannot_be_read_counts_as_none(tmp_path):
    progress = Progress.kept_in(tmp_path, {})
    progress.file.write_text('{"measurements": [')
    assert Progress.kept_in(tmp_path, {}).measurements == []


def test_two_runs_do_not_measure_in_one_folder_at_once(tmp_path):
    with (
        only_run_in(tmp_path),
        pytest.raises(BusyError, match="another run measures in"),
        only_run_in(tmp_path),
    ):
        pass
    with only_run_in(tmp_path):
        pass


# --- figures --------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    up, vllm = medians(MEASUREMENTS)
    assert up["output_tokens_per_s"] == {
        "median": 300.0, "min": 150.0, "max": 400.0, "rounds": 3,
        "ratio_to_vllm": 3.0, "ratios": [2.5, 4.0], "verdict": BETTER,
    }  # fmt: skip
    assert "verdict" not in vllm["output_tokens_per_s"]


def test_rounds_without_the_yardstick_have_no_ratio():
    [alone] = medians([measurement("up", 0, 300.0)])
    assert "ratio_to_vllm" not in alone["ttft_ms"]
    [up, _] = medians([measurement("up", 0, 300.0), measurement("up", 1, 90.0), measurement("vllm", 1, 30.0)])
    assert up["output_tokens_per_s"]["ratio_to_vllm"] == 3.0  # of round 1 alone
    assert up["output_tokens_per_s"]["verdict"] == UNDECIDED


@pytest.mark.parametrize(
    ("ratio", "low", "high", "more", "less"),
    [
        (3.0, 2.5, 4.0, BETTER, WORSE),
        (0.5, 0.4, 0.6, WORSE, BETTER),
        (1.2, 0.95, 1.3, EQUAL, EQUAL),  # the rounds don't agree
        (1.02, 1.01, 1.06, EQUAL, EQUAL),  # nearer to 1 than half of the spread
        (1.04, 1.03, 1.06, BETTER, WORSE),
        (1.0, 1.0, 1.0, EQUAL, EQUAL),
    ],
)
def test_a_difference_within_the_spread_between_rounds_counts_as_equal(ratio, low, high, more, less):
    comparison = Comparison(ratio, low, high, 3)
    assert comparison.verdict(more_is_better=True) == more
    assert comparison.verdict(more_is_better=False) == less


def test_one_round_decides_nothing():
    assert Comparison(3.0, 3.0, 3.0, 1).verdict(more_is_better=True) == UNDECIDED


def test_a_round_whose_tokens_came_all_at_once_has_no_ratio_of_times_between_tokens():
    ours = {1: {"tpot_ms": 2.0}, 2: {"tpot_ms": 3.0}}
    assert compare(ours, {1: {"tpot_ms": 0.0}, 2: {"tpot_ms": 6.0}}, "tpot_ms") == Comparison(
        0.5, 0.5, 0.5, 1
    )
    assert compare(ours, {1: {"tpot_ms": 0.0}}, "tpot_ms") is None


def test_goodput_takes_the_place_of_tokens_per_second_under_an_open_load():
    [row] = medians([measurement("up", 0, 300.0, load="open", goodput_per_s=15.5)])
    assert row["goodput_per_s"]["median"] == 15.5
    assert "output_tokens_per_s" not in row


# --- tables ---------------------------------------------------------------------------------------


def test_the_long_table_has_medians_with_ratios_and_verdicts_and_a_dash_for_what_is_missing(report):
    lines = long_table(report).splitlines()
    assert lines[0] == "| model | load |  |  | UP | SERVE | VLLM | VLLM-PAIR | TRANSFORMERS | LLAMA.CPP |"
    assert lines[2] == (
        "| 2 M parameters | 256 → 128 | 32 in flight | output tokens/s "
        "| 300.0 (3.00 ×, better) | – | 100.0 | – | – | – |"
    )
    assert lines[3] == "|  |  |  | TTFT, ms | 10.0 (1.00 ×, equal) | – | 10.0 | – | – | – |"
    assert len(lines) == 5


def test_the_short_table_has_five_rows_with_all_figures_in_a_cell(whole, report):
    lines = short_table(whole).splitlines()
    assert len(lines) == 2 + 5
    assert lines[0] == "|  | UP | SERVE | VLLM | LLAMA.CPP |"
    assert (
        "| goodput 8.0 requests/s (1.00 ×)<br>TTFT 10.0 ms (1.00 ×)<br>TPOT 2.00 ms (1.00 ×) |" in lines[-1]
    )
    [line] = short_table(report).splitlines()[2:]
    assert line.startswith(
        "| 2 M parameters, 256 → 128, 32 in flight | output tokens/s 300.0 (3.00 ×)<br>TTFT 10.0 ms"
    )


def test_what_a_feature_changes_is_relative_to_the_same_contender_without_it(report):
    assert changes_table(report) == ""
    sampled = [measurement("up", number, rate, load="sampled") for number, rate in enumerate([270, 150, 400])]
    [line] = changes_table(report_of(MEASUREMENTS + sampled)).splitlines()[2:]
    assert line == (
        "| temperature 1, top-p 0.95 ÷ greedy | 2 M parameters | 32 in flight "
        "| 1.00 × (0.90 to 1.00) | – | – | – |"
    )


def test_our_pair_is_shown_in_multiples_of_vllms_pair(report):
    assert pairs_table(report) == ""
    theirs = [measurement("vllm-pair", number, rate, ttft=100.0) for number, rate in enumerate([50, 50, 40])]
    lines = pairs_table(report_of(MEASUREMENTS + theirs)).splitlines()
    assert lines[0] == "| UP ÷ VLLM-PAIR | load |  | output tokens/s | TTFT | TPOT |"
    assert lines[2:] == ["| 2 M parameters | 256 → 128 | 32 in flight | 6.00 × | 0.10 × | 1.00 × |"]


def test_where_we_are_worse_is_named():
    slow = [measurement("serve", number, 10.0) for number in range(3)]
    lines = list(verdicts(report_of(MEASUREMENTS + slow)))
    assert lines[0] == "UP beside vLLM, of 3 figures: 1 better, 2 equal."
    assert lines[1].startswith(
        "SERVE beside vLLM, of 3 figures: 2 equal, 1 worse. Worse: 2 M parameters, 256 → 128, 32"
    )
    assert lines[1].endswith("in flight: output tokens/s 0.10 ×.")


def test_who_answers_differently_is_named(report):
    assert "the greedy answers were the same" in answers_line(report)
    line = answers_line(report | {"answers": {"2m": {"UP": "abc", "VLLM": "abd"}}})
    assert "(2 M parameters: VLLM)" in line


# --- publication ----------------------------------------------------------------------------------


def test_only_a_whole_run_is_published(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in (publication.PUBLISHED.parent, publication.PLOT.parent):
        folder.mkdir(parents=True)
    before = f"before {publication.BEGIN} old {publication.END} after\n"
    for document in (publication.README, publication.DOCUMENT):
        document.write_text(before)
    without_one = [one for one in whole["measurements"] if (one["load"], one["round"]) != ("prefix", 1)]
    for partial in (
        {"failures": [{"model": "2m", "arrangement": "up"}]},
        {"arrangements": {"up": {"title": "UP"}}, "measurements": without_one},
        {"settings": whole["settings"] | {"scale": 0.5}},
        {"settings": whole["settings"] | {"dtype": "bfloat16"}},
        {"measurements": without_one},
    ):
        publication.publish(whole | partial)
        assert "stay as they are" in capsys.readouterr().out
        assert publication.README.read_text() == before
    publication.publish(whole)
    assert short_table(whole) in publication.README.read_text()
    assert long_table(whole) in publication.DOCUMENT.read_text()
    assert publication.PUBLISHED.exists()
    assert publication.PLOT.exists()


def test_a_run_without_llama_cpp_may_be_published(whole):
    contenders = {name: about for name, about in whole["arrangements"].items() if name != "llama.cpp"}
    found = [one for one in whole["measurements"] if one["arrangement"] != "llama.cpp"]
    assert publication.missing(whole | {"arrangements": contenders, "measurements": found}) == []


# --- contenders -----------------------------------------------------------------------------------


def test_what_generate_takes_into_one_batch_is_of_one_size():
    jobs = queue.SimpleQueue()
    first, alike, longer = (Job([1, 2], num_tokens, print) for num_tokens in (8, 8, 9))
    for job in (alike, longer):
        jobs.put(job)
    assert gather(jobs, first) == ([first, alike], longer)


def test_llama_cpps_converter_gets_a_pattern_and_no_experts():
    layers = ["linear_attention", "mlp", "full_attention"]
    config = {
        "layers_block_type": layers,
        "num_experts_per_tok": 3,
        "mtp_layers_block_type": [],
        "head_dim": 64,
    }
    assert converter_config(config) == {
        "hybrid_override_pattern": "M-*", "num_hidden_layers": 3, "head_dim": 64
    }  # fmt: skip
    with pytest.raises(KeyError, match="moe"):
        converter_config({"layers_block_type": ["moe"]})


# --- limits ---------------------------------------------------------------------------------------


class Rates:
    """A machine with 10 FLOP/s that reads 10 and copies 5 bytes/s, whatever their number."""

    def flops_per_s(self):
        return 10.0

    def bytes_per_s(self, kind, bytes_moved, sets):
        return {"read": 10.0, "copy": 5.0}[kind]


@pytest.mark.parametrize("at", [1, 8, 32])
def test_a_limit_is_one_wave_of_prompts_and_steps(at, tmp_path):
    size = StepSize.of(read_config(MODELS["2m"].directory(tmp_path), device="cpu"))
    load = LOADS["short"]
    found = limit("2m", size, load, at, Rates())
    least = (size.body + size.head) / 10 + at * 2 * size.slot_bytes / 5
    assert found.step_s > least
    assert found.prompt_s * 10 > load.input_len * size.token_flops
    wave_s = at * found.prompt_s + load.output_len * found.step_s
    assert found.output_tokens_per_s == pytest.approx(at * load.output_len / wave_s)


def test_the_table_of_limits_says_how_much_of_them_is_reached(report):
    assert limits_table(report) == ""
    report["limits"] = [
        {"model": "2m", "load": LIMITED[0], "at": 32, "prompt_s": 0.007, "step_s": 0.002}
        | {"output_tokens_per_s": 1000.0}
    ]
    last = limits_table(report).splitlines()[-1]
    assert last.endswith("| 7 ms | 2 ms | 1,000 | 30% | – | 10% | – |")
