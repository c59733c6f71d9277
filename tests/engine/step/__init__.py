"""Tests of engine/step."""
