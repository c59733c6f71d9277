"""Tests of router/http/connections."""
