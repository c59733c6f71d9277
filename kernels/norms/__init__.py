"""Norms, gates and activations between matrix products."""
