"""NIXL: agents, descriptors, reads under way, and the thread that polls them."""
