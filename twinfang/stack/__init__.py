"""Plans, starts, restarts and stops processes that belong together."""
