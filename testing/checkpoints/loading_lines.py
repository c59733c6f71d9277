"""What loading a checkpoint has logged."""

from __future__ import annotations

import pytest

LOADERS = ("engine.checkpoint", "engine.models")


def loading_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of those who load. Other lines can come from engines of tests before, some seconds
    later: how often one of theirs was repeated."""
    return [one.getMessage() for one in caplog.records if one.name.startswith(LOADERS)]
