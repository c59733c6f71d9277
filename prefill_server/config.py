"""The configuration of a prefill server."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.engine_server import EngineServerConfig
from wire.errors import ConfigError


@dataclass(frozen=True)
class PrefillConfig(EngineServerConfig):
    """Configuration of one prefill server process. The server reads from other servers only states that were
    kept for conversations."""

    lease_ttl_s: float = 120.0
    """How long blocks and state of a prefilled prompt are kept for a decode server to read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lease_ttl_s > 0:
            raise ConfigError(f"`lease_ttl_s` must be positive, got {self.lease_ttl_s}")
