"""The two pools, KV blocks and states: formats, indices, and the prefixes that they hold."""
