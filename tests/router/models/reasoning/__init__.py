"""Tests of router/models/reasoning."""
