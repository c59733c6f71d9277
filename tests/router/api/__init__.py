"""Tests of router/api."""
