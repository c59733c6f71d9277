"""Of the benchmark of conversations on several tiers: the same prompts for all, what a log says, what may be
published. Of the soak: how files are damaged."""

from __future__ import annotations

import tempfile

import pytest

from benchmarks.caches.tier_contenders import errors_in
from benchmarks.caches.tier_load import NUM_SESSIONS, NUM_TURNS, TierLoad
from benchmarks.caches.tier_report import missing, section
from benchmarks.soak.file_faults import FileFaults

LOAD = TierLoad(first_tokens=10, new_tokens=4, answer_tokens=3, last_token_id=99, num_sessions=5, num_turns=4)


def test_a_prompt_continues_the_one_before_and_its_answer():
    first = LOAD.prompt(2, [])
    second = LOAD.prompt(2, [[7, 7, 7]])
    assert len(first) == LOAD.prompt_tokens(0) == 10
    assert len(second) == LOAD.prompt_tokens(1) == 17
    assert second[:13] == [*first, 7, 7, 7]
    assert LOAD.max_tokens == LOAD.prompt_tokens(3) + 3
    assert LOAD.prompt(3, []) != first
    assert all(sorted(LOAD.order(turn)) == [0, 1, 2, 3, 4] for turn in range(4))
    assert len({tuple(LOAD.order(turn)) for turn in range(4)}) > 1


def test_errors_in_a_log_are_found_once_and_without_their_prefixes():
    text = (
        "(EngineCore pid=12) ERROR 11-26 17:00:01 [core.py:9] Traceback (most recent call last):\n"
        "(EngineCore pid=12) ERROR 11-26 17:00:01 [core.py:9]     raise Exception(\n"
        "(EngineCore pid=12) ERROR 11-26 17:00:01 [core.py:9] Exception: offloading needs a GPU\n"
        "(EngineCore pid=12) Exception: offloading needs a GPU\n"
        "(APIServer pid=3) RuntimeError: Engine core initialization failed.\n"
        "(APIServer pid=3) INFO 11-26 17:00:01 [x.py:1] no Error: here\n"
    )
    with tempfile.TemporaryFile() as log:
        log.write(text.encode())
        log.flush()
        assert errors_in(log) == [
            "Exception: offloading needs a GPU",
            "RuntimeError: Engine core initialization failed.",
        ]


def visit(title, ttft_ms, cached, refusals=()):
    row = {"prompt_tokens": 100, "cached_tokens": cached, "ttft_ms": ttft_ms}
    return {
        "title": title,
        "uses": "",
        "refusals": list(refusals),
        "answers": 384,
        "answers_equal": 384,
        "cores": [{"other_cores": 0.01}],
        "turns": [{"turn": turn + 1, **row} for turn in range(NUM_TURNS)],
    }


@pytest.fixture
def report():
    refusal = {"what": "offloading", "flags": "--offload", "says": ["Exception: no"]}
    contenders = {
        "no tiers": visit("no tiers", 50.0, 0.0),
        "host": visit("host memory for all", 5.0, 96.0),
        "files": visit("host memory for 8, and files", 6.0, 96.0),
        "vllm": visit("vLLM", 70.0, 0.0, [refusal]),
    }
    models = {name: {"title": f"{name} model", "contenders": contenders} for name in ("bundled", "120m")}
    machine = {"processor": "a processor", "cores": 2}
    return {"machine": machine, "sessions": NUM_SESSIONS, "models": models, "failures": []}


def test_tables_have_a_row_for_each_contender_and_say_what_was_refused(report):
    text = section(report)
    assert "| TTFT ms, host memory for all | 5.0 |" in text
    assert "| found, host memory for all | 96 |" in text
    assert "| TTFT ms, vLLM, computes anew | 70.0 |" in text
    assert "| found, vLLM" not in text
    assert "* offloading (`--offload`): `Exception: no` (bundled model, 120m model)" in text


def test_only_whole_runs_are_published(report):
    assert missing(report) == []
    del report["models"]["120m"]
    assert missing(report | {"sessions": 4, "failures": ["it failed"]}) == [
        "it failed",
        f"4 sessions, not {NUM_SESSIONS}",
        "120m: only nothing",
    ]


def test_damage_changes_some_segments_and_says_how(tmp_path):
    folder = tmp_path / "cache" / "model-0"
    folder.mkdir(parents=True)
    for number in range(40):
        (folder / f"{number:03}.segment").write_bytes(bytes(range(256)) * 600)
    note = FileFaults({"one": tmp_path / "cache"}, seed=1).damage("one")
    left = [path.read_bytes() for path in sorted(folder.iterdir())]
    assert all(kind in note for kind in ("flipped", "truncated", "foreign", "deleted"))
    assert 5 < sum(data == bytes(range(256)) * 600 for data in left) < 35
