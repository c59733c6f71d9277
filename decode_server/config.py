"""What a decode server is told. With the engine's role ``both`` it is the monolithic server."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from wire.errors import ConfigError


@dataclass(frozen=True)
class DecodeConfig:
    """One decode server process."""

    engine: EngineConfig
    host: str
    port: int
    served_model_name: str
    metrics_port: int | None = None
    """Of HTTP for metrics and probes. 0: none; None: 10,000 above :attr:`port`."""
    otlp_endpoint: str = ""
    """Where traces go: a collector's base URL; empty: where the OTEL_* variables say, if they do."""
    advertise_host: str | None = None
    """Host that prefill servers reach this server by; None takes ``host``."""
    keep_ttl_s: float = 300.0
    """How long blocks and state of an answered request are kept for its conversation's next turn."""
    transfer_deadline_s: float = 30.0
    """A read that takes longer is given up; its destination is quarantined."""
    handshake_timeout_s: float = 15.0
    local_prefill: bool = False
    """Whether this server runs a prompt itself when no prefill server's state can be had."""

    def __post_init__(self) -> None:
        if self.engine.role == "decode" and self.host in ("0.0.0.0", "::") and self.advertise_host is None:
            raise ConfigError(
                f"--host {self.host} listens on every address, but the ticket of a kept state must name one: "
                "set --advertise-host to the host that prefill servers reach"
            )
        if not self.transfer_deadline_s > 0:
            raise ConfigError(f"--transfer-deadline must be positive, got {self.transfer_deadline_s}")
