"""Decides who may use the router: API keys and their file, host names and sites that may send requests."""
