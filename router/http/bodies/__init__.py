"""Bodies of requests: how large they may be, what memory and time they get, how they are read."""
