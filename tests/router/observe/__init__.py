"""Tests of router/observe."""
