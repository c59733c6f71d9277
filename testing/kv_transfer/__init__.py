"""Pools and processes for both ends of a transfer."""
