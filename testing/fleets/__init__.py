"""Processes that tests and benchmarks start and disturb."""
