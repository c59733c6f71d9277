"""``twinfang bench``: compares a handoff between two local processes with a raw NIXL READ and a copy."""
