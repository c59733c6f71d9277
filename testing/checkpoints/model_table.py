"""Makes the table of docs/models.md, family by feature, from the results that tests of families record.

    python -m pytest -m '' --model-table \\
        tests/engine/models/test_families.py tests/end_to_end/models/test_families.py

writes the table again. A test records what it shows with :meth:`Feature.record`. A cell gives the number of
passed tests and of all tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum

import pytest

from testing.repository import DOCS

PAGE = DOCS / "models.md"
BEGIN, END = "<!-- table of passed tests: begin -->", "<!-- end -->"
PROPERTY = "shows"


class Feature(Enum):
    """Columns of the table."""

    LOGITS = "logits"
    MODE_NONE = "mode `none`"
    MODE_ALIGN = "mode `align`"
    MODE_ALL = "mode `all`"
    SPECULATION = "speculation"
    TENSOR_PARALLEL = "2 tensor-parallel ranks"
    DISAGGREGATED = "disaggregated"

    @classmethod
    def of_mode(cls, mode: str) -> Feature:
        """Return the feature of a cache mode."""
        return cls[f"MODE_{mode.upper()}"]

    def record(self, record_property: Callable[[str, object], None], name: str) -> None:
        """Record that the test shows this feature for the checkpoint ``name``."""
        record_property(PROPERTY, (name, self.name))


class ModelTable:
    """A pytest plugin that gathers the recorded features, also from worker processes."""

    def __init__(self) -> None:
        self.passed: Counter[tuple[str, Feature]] = Counter()
        self.run: Counter[tuple[str, Feature]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or report.skipped:
            return
        for key, shown in report.user_properties:
            if key == PROPERTY:
                cell = shown[0], Feature[shown[1]]
                self.run[cell] += 1
                self.passed[cell] += report.passed

    def pytest_sessionfinish(self) -> None:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{self.rows()}\n{END}{after}", encoding="utf-8")

    def rows(self) -> str:
        """Return the rows as Markdown."""
        from testing.checkpoints.families import CASES  # needs transformers

        lines = ["| family | checkpoint | drafter | " + " | ".join(one.value for one in Feature) + " |"]
        lines.append("|---" * (3 + len(Feature)) + "|")
        for name, case in CASES.items():
            cells = [case.family, f"`{name}`", "MTP" if case.has_mtp else "n-gram"]
            cells += [self._cell((name, feature)) for feature in Feature]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def _cell(self, cell: tuple[str, Feature]) -> str:
        if not self.run[cell]:
            return "–"
        return f"{self.passed[cell]} of {self.run[cell]}"
