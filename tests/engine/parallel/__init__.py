"""Tests of engine/parallel."""
