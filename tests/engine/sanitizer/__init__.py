"""Tests of engine/sanitizer."""
