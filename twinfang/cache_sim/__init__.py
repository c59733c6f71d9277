"""``twinfang cache-sim``: replays a log of prompt hashes against cache policies and budgets.

It uses the engine's own prefix cache and policies. It needs no clock, no weights and no GPU.
"""
