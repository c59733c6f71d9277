"""Tests of router/http."""
