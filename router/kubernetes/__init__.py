"""Servers that are pods: found by watching the Kubernetes API, added and removed as an operator would do
it."""
