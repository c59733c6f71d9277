"""Checks that every step reads the blocks and states it should."""
