"""Tests of ``twinfang fetch-model``."""
