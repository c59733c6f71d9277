"""``twinfang bench``: a handoff between two processes of this machine beside a raw NIXL READ and a copy."""
