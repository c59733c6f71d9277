"""Bodies of requests: how large they may be, how much memory and time they get, how they are read."""
