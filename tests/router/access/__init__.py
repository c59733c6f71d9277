"""Tests of router/access."""
