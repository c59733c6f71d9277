"""Tests of router/api/openai."""
