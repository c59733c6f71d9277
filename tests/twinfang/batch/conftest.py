"""Stacks shared by the tests of this folder, their logs shown when one fails."""

from testing.fleets.stack import pytest_runtest_makereport, stacks

__all__ = ["pytest_runtest_makereport", "stacks"]
