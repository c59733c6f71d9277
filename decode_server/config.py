"""The configuration of a decode server. With the engine's role ``both`` it is the monolithic server."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.engine_server import EngineServerConfig


@dataclass(frozen=True)
class DecodeConfig(EngineServerConfig):
    """Configuration of one decode server process."""

    keep_ttl_s: float = 300.0
    """How long blocks and state of an answered request are kept for its conversation's next turn."""
    local_prefill: bool = False
    """Whether this server computes a prompt itself if no prefill server can hand over its state."""
