"""Paged attention of prefill and decode rows, rotary embedding, and writing to the KV cache."""
