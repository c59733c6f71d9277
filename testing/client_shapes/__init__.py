"""Requests that real clients sent, as data, and what answers to them must look like."""
