"""Ops in which the ranks of a model take part together."""
