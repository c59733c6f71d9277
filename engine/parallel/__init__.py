"""Collectives among ranks that share a model's tensors, and among servers that share its experts."""
