"""What lies behind host memory: cached prefixes in files, and those in other servers' host memory.

Here it is decided which of them are written, which are read, and for how long a request waits, and what is
lent to other servers. Rank 0 decides for all ranks of a server. What moves the bytes is
:mod:`kv_transfer.files` and :mod:`kv_transfer.starts`.
"""
