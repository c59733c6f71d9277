"""The table of docs/reliability.md, written by a run of some tests."""

from testing.faults.reliability_table import BEGIN, END, Table


def test_a_run_of_some_tests_keeps_the_rows_of_others(tmp_path):
    document = tmp_path / "page.md"
    document.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    whole, some = Table(), Table()
    whole.add("frozen", "any", "the exact answer", "a lease", 1.0)
    whole.add("killed", "one", "503", "3 attempts", 2.0)
    whole.write(document)
    some.add("killed", "one", "503, at once", "3 attempts", 0.5)
    some.add("damaged", "any", "the exact answer", "3 attempts", 0.1)
    some.with_rows_of(document).write(document)
    lines = [line for line in document.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert lines[2:] == [
        "| damaged | any | the exact answer | 3 attempts | 0.1 |",
        "| frozen | any | the exact answer | a lease | 1.0 |",
        "| killed | one | 503, at once | 3 attempts | 0.5 |",
    ]
