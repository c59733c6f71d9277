"""Fixtures that the end-to-end tests share: stacks of real processes, and clients."""

from testing.fleets.stack import module_stacks, pytest_runtest_makereport, stacks

__all__ = ["module_stacks", "pytest_runtest_makereport", "stacks"]
