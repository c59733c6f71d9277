"""The configuration of ``twinfang autoscale``."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from twinfang.autoscale.needs import Objectives
from twinfang.autoscale.pool_planner import PlannerPace, PoolLimits
from twinfang.flags.token_file import read_token
from wire.errors import ConfigError
from wire.tls.identity_files import IdentityFiles


@dataclass(frozen=True)
class PoolSource:
    """One pool: where its servers' metrics are, and which Deployment is scaled."""

    role: str
    urls: tuple[str, ...]
    limits: PoolLimits
    deployment: str = ""
    """If empty, the pool's size is the number of servers that metrics show, and nothing is scaled."""

    def __post_init__(self) -> None:
        if not self.urls:
            raise ConfigError(f"where are the metrics of {self.role} servers? Give --{self.role}-metrics URL")
        if self.limits.minimum > self.limits.maximum:
            raise ConfigError(
                f"--min-{self.role} {self.limits.minimum} is above --max-{self.role} {self.limits.maximum}"
            )


@dataclass(frozen=True)
class RouterIdentity:
    """How routers that speak HTTPS prove who they are."""

    ca_file: Path | None = None
    """None: the system's authorities."""
    server_name: str = ""
    """The name in their certificates. Empty: that of the URL."""

    def context(self) -> ssl.SSLContext:
        """Raises :class:`ConfigError` if the authorities can't be read."""
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--router-ca-file {self.ca_file} can't be read: {error}; expected certificates in PEM"
            ) from error


@dataclass(frozen=True)
class AutoscaleConfig:
    """All settings. Raises :class:`ConfigError` for values that contradict one another."""

    router_urls: tuple[str, ...]
    prefill: PoolSource
    decode: PoolSource
    objectives: Objectives
    pace: PlannerPace
    interval_s: float = 15.0
    window_s: float = 60.0
    """Time over which loads are averaged."""
    namespace: str = ""
    kubeconfig: Path | None = None
    applies: bool = False
    """If False, decisions are only printed."""
    host: str = "127.0.0.1"
    router_identity: RouterIdentity = RouterIdentity()
    metrics_port: int = 0
    """Port of the autoscaler's own metrics; 0: none."""
    identity: IdentityFiles | None = None
    """Files for mutual TLS with servers, which show their metrics only so when they have it."""
    router_token_file: Path | None = None
    """Holds what routers are shown, which may show their metrics to nobody else. Its content may change."""

    def router_token(self) -> str:
        """Raises :class:`ConfigError` if the file has no token."""
        path = self.router_token_file
        return "" if path is None else read_token("router_token_file", path)

    def __post_init__(self) -> None:
        if not self.router_urls:
            raise ConfigError("where are the routers' metrics? Give --router-metrics URL")
        self.router_token()
        if self.window_s < 2 * self.interval_s:
            raise ConfigError(
                f"--window {self.window_s:g} is too short for --interval {self.interval_s:g}: the window "
                "must be at least two intervals"
            )
        named = [pool.role for pool in (self.prefill, self.decode) if pool.deployment]
        if named and not self.namespace:
            raise ConfigError(f"--{named[0]}-deployment needs --kubernetes-namespace NS")
        if self.applies and not named:
            raise ConfigError("--apply needs something to scale: --prefill-deployment or --decode-deployment")
