"""Starts servers by forking a process that has already imported their modules and loaded their weights."""
