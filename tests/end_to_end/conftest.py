"""What the end-to-end tests share: stacks of real processes, and clients."""

from tests.stack import pytest_runtest_makereport, stacks

__all__ = ["pytest_runtest_makereport", "stacks"]
