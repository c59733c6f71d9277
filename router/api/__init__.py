"""Reads requests and writes answers: what all HTTP APIs share, and probes."""
