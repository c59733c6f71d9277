"""The table of docs/reliability.md and its JSON."""

from benchmarks.json_file import read_json
from conformance.report import BEGIN, DOCUMENT, END, JSON, section


def test_the_table_is_that_of_the_results():
    text = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert text.strip() == section(read_json(JSON))


def test_our_pair_has_every_case_right():
    results = read_json(JSON)["systems"]["twinfang"]["results"]
    assert len(results) == 33
    assert not [one for one in results if one["wrong"] or one["hangs"] or one["lost"] or one["problem"]]
