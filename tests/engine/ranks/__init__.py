"""Tests of engine/ranks."""
