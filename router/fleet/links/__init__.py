"""One server each: its connection and calls, whether it drains or fails, its load, its cache."""
