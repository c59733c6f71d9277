"""Reads by servers whose ranks are separate processes."""
