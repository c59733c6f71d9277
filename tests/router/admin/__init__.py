"""Tests of router/admin."""
