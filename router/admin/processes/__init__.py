"""The router processes that share a port (``--workers N``), seen and asked by one of them
([why so](../../../docs/decisions/041-admin-of-processes.md))."""
