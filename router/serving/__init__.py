"""Serves one request: its choices, their dispatch, repeated if a server dies, and the answers."""
