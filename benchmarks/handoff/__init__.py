"""From prefill to decode: raw reads, and time to the first token."""
