"""Serves one request: its choices, their dispatch to servers, retries if a server fails, and the answers."""
