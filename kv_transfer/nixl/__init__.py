"""NIXL: agents, descriptors, reads in flight, and the thread that polls them."""
