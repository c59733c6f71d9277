"""The table of docs/reliability.md, from what the fault tests saw."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from testing.marked_section import replace_between

BEGIN = "<!-- written by: pytest tests/faults --write-table -->"
END = "<!-- end of what the tests write -->"


@dataclass
class Table:
    """One row a fault and way of pairing servers."""

    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, fault: str, servers: str, outcome: str, bound: str, seconds: float) -> None:
        """``bound`` says in words what limits the time; ``seconds`` is what this run took."""
        self.rows.append((fault, servers, outcome, bound, f"{seconds:.1f}"))

    def write(self, document: Path) -> None:
        """Replaces what stands between the marks."""
        head = ("fault", "servers", "the client gets", "bounded by", "s, this run")
        lines = [
            _line(head),
            _line(("---",) * len(head)),
            *map(_line, sorted(self.rows, key=lambda row: row[0])),
        ]
        replace_between(document, BEGIN, END, "\n".join(lines))

    def missing_from(self, document: Path) -> list[str]:
        """Rows that the document does not have; seconds differ from run to run."""
        text = document.read_text(encoding="utf-8")
        return [line for line in (_line(row[:-1]) for row in self.rows) if line not in text]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"
