"""Cached prefixes that servers read out of one another's host memory: lending, reading, handing over."""
