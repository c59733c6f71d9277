"""Mixture of experts: routing, sorting by expert, combining."""
