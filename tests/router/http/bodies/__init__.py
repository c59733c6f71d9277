"""Tests of router/http/bodies."""
