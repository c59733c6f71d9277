"""The launches and bytes of a decode step that docs/performance.md has are those of the code."""

from __future__ import annotations

import pytest

from benchmarks.steps.traffic import DOCUMENT, DRAFTS, MODELS, ROWS, SAMPLING, CapturedSteps, measure, table

CASES = [
    pytest.param(model, k, marks=[] if (model, k) == ("8b", 0) else pytest.mark.exhaustive)
    for model in MODELS
    for k in DRAFTS
]


@pytest.mark.parametrize(("model", "k"), CASES)
def test_launches_and_bytes_are_those_of_the_documentation(model, k):
    found = table(measure((model,), (k,))).splitlines()
    published = DOCUMENT.read_text(encoding="utf-8").splitlines()
    assert [line for line in found if line not in published] == []


def test_a_greedy_step_reads_weights_states_and_kv_once(tmp_path):
    steps = CapturedSteps("8b-slice", 3, tmp_path)
    for num_rows in ROWS:
        found, least = steps.traffic(num_rows, SAMPLING["greedy"]), steps.least(num_rows)
        assert found.weights == pytest.approx(least.weights, rel=0.001)
        assert found.states == pytest.approx(least.states, rel=0.001)
        assert found.kv == pytest.approx(least.kv, rel=0.005)  # a step reads what it has just written
