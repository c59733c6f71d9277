"""Servers that are pods: found by watching the Kubernetes API, taken in and out as an operator would."""
