"""Requests in, answers out: what all HTTP APIs share, and probes."""
