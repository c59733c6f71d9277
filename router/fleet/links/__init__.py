"""One server: its connection and calls, its drain, its failures, its load, its cache."""
