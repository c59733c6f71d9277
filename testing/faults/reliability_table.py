"""Makes the table of docs/reliability.md from the results of the fault tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from testing.marked_section import replace_between

BEGIN = "<!-- written by: pytest tests/faults --write-table -->"
END = "<!-- end of what the tests write -->"


@dataclass
class Table:
    """The table, with one row for each fault and pairing of servers."""

    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, fault: str, servers: str, outcome: str, bound: str, seconds: float) -> None:
        """Adds a row. ``bound`` says in words what limits the time; ``seconds`` is the time of this run."""
        self.rows.append((fault, servers, outcome, bound, f"{seconds:.1f}"))

    def write(self, document: Path) -> None:
        """Replaces the text between the marks."""
        head = ("fault", "servers", "the client gets", "bounded by", "s, this run")
        lines = [
            _line(head),
            _line(("---",) * len(head)),
            *map(_line, sorted(self.rows, key=lambda row: row[0])),
        ]
        replace_between(document, BEGIN, END, "\n".join(lines))

    def with_rows_of(self, document: Path) -> Table:
        """Returns a table that also has the document's rows of faults and servers that were not tried now."""
        text = document.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
        _head, _rule, *lines = [line for line in text.splitlines() if line.startswith("| ")]
        before = [tuple(line.removeprefix("| ").removesuffix(" |").split(" | ")) for line in lines]
        tried = {row[:2] for row in self.rows}
        return Table([row for row in before if row[:2] not in tried] + self.rows)

    def missing_from(self, document: Path) -> list[str]:
        """Returns the rows that are missing in the document, ignoring seconds, which differ between runs."""
        text = document.read_text(encoding="utf-8")
        return [line for line in (_line(row[:-1]) for row in self.rows) if line not in text]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
