"""Tests of :mod:`engine.files`."""
