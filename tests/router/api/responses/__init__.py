"""Tests of router/api/responses."""
