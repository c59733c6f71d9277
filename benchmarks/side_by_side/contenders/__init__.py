"""The compared servers: how each is found, started and stopped."""
