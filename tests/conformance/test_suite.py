"""The suite's cases on a real pair: some in every run of the tests, all in `make test-all`."""

import pytest

from conformance.cases import CASES
from conformance.run import Settings, line, suite
from conformance.twinfang_pair import TwinfangPair

QUICK = ("one-token", "pressure")


def assert_all_right(names, folder):
    cases = [case for case in CASES if case.name in names]
    results = list(suite(TwinfangPair(), cases, Settings(folder, runs=1)))
    said = "\n".join(map(line, results))
    assert sorted(result.case for result in results) == sorted(case.name for case in cases)
    assert all(result.is_good and not result.notes for result in results), said
    assert all(result.right > 0 and result.errors == 0 for result in results), said


def test_answers_are_right_and_all_is_given_back(tmp_path):
    assert_all_right(QUICK, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_answers_are_right_whatever_happens_to_the_handoff(tmp_path):
    assert_all_right([case.name for case in CASES], tmp_path)
