"""Metrics pages of which a test sets the values."""

from testing.autoscale.metrics_pages import pages

__all__ = ["pages"]
