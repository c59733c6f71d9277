"""Tests with real processes: a stack, HTTP, and nothing in place of a part."""
