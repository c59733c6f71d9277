"""Handoffs from prefill to decode: raw reads, and time to first token."""
