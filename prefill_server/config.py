"""What a prefill server is told."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from wire.errors import ConfigError


@dataclass(frozen=True)
class PrefillConfig:
    """One prefill server process."""

    engine: EngineConfig
    host: str
    port: int
    served_model_name: str
    metrics_port: int | None = None
    """Of HTTP for metrics and probes. 0: none; None: 10,000 above :attr:`port`."""
    otlp_endpoint: str = ""
    """Where traces go: a collector's base URL; empty: where the OTEL_* variables say, if they do."""
    advertise_host: str | None = None
    """Host that decode servers reach this server by; None takes ``host``."""
    transfer_deadline_s: float = 30.0
    """A read of a conversation's kept state that takes longer is given up; the prompt is then computed."""
    handshake_timeout_s: float = 15.0
    lease_ttl_s: float = 120.0
    """How long blocks and state of a prefilled prompt are kept for a decode server to read."""

    def __post_init__(self) -> None:
        if not self.lease_ttl_s > 0:
            raise ConfigError(f"--lease-ttl must be positive, got {self.lease_ttl_s}")
        if self.host in ("0.0.0.0", "::") and self.advertise_host is None:
            raise ConfigError(
                f"--host {self.host} listens on every address, but a ticket must name one: "
                "set --advertise-host to the host that decode servers reach"
            )
