"""Tests of engine/cost."""
