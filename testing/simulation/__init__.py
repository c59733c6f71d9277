"""Simulated time, and policies in it."""
