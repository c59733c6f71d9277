"""Cached prefixes in files: append-only segments, an index of them, and the thread that moves bytes."""
