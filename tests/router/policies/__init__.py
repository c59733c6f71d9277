"""Tests of router/policies."""
