"""Pools and processes at both ends of a transfer."""
