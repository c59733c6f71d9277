"""Tests of families of metrics."""
