"""Tests of the limits of API keys."""
