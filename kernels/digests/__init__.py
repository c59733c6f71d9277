"""Digests of memory that servers hand over."""
