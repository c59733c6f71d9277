"""Limits of API keys: admits requests, and counts what they use, with other processes and routers."""
