"""Collectives: of ranks that share a model's tensors, and of servers that share its experts."""
