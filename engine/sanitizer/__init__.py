"""Checks that every step reads the right blocks and states."""
