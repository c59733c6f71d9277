"""The tables of docs/api.md are those of testing.api_table."""

from testing.api_table import BEGIN, END, PAGE, tables


def test_the_page_has_the_tables_as_they_are_written():
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    shown, found, _ = rest.partition(END)
    assert found
    assert shown.strip() == tables(), "python -m testing.api_table writes them anew"
