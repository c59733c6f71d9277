"""Several servers: handoffs that overlap, answers that move, prefixes, hosts."""
