"""Parameters of tests that sweep two things at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from _pytest.mark.structures import ParameterSet


def crossed(rows: Sequence[object], kinds: Sequence[tuple[object, ...]]) -> list[ParameterSet]:
    """Return all pairs of rows and kinds. Every run tries each kind with the last rows, and all rows with the
    first kind. The other pairs run only in ``make test-all``."""
    return [
        pytest.param(
            one, *kind, marks=[] if kind is kinds[0] or one is rows[-1] else [pytest.mark.exhaustive]
        )
        for one in rows
        for kind in kinds
    ]
