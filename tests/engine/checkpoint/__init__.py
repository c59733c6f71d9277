"""Tests of engine/checkpoint."""
