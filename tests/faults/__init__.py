"""Tests that kill, freeze and disconnect processes."""
