"""Tests of router/api/anthropic."""
