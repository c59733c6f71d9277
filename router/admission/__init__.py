"""Decides which requests run, which wait and which are refused."""
