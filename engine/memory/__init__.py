"""The two pools, KV blocks and states: their formats, their indices, and the prefixes that they cache."""
