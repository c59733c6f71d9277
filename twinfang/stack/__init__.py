"""Processes that belong together: which there are, how they start, restart and stop."""
