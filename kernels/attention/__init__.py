"""Paged attention of prefill and decode rows, rotary embedding, and the write into the KV cache."""
