"""Requests that real clients sent, as data, and the types that answers to them must have."""
