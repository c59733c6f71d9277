"""Cached prefixes in files: which of them are written, which are read back, and for how long a request waits.

Files lie behind host memory (:mod:`engine.memory.host_tier`). What reads and writes them is
:mod:`kv_transfer.files`. Rank 0 decides for all ranks of a server.
"""
