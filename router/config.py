"""What a router process is told at its start, and what may change while it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal

from router.policies.policy_names import PolicyName
from wire.errors import ConfigError, InvalidRequestError

ToolParserName = Literal["auto", "none", "hermes", "nemotron_json", "qwen3_coder"]


HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110, section 5.6.2."""

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
"""As a browser sends it: RFC 6454, section 6.1."""

ALLOWED_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\]")
"""A name, all names below one, or an address, of IPv6 in brackets."""


WEEK_S = 7 * 24 * 3600
HIGHEST = {
    "max_requests_in_flight": 10**9,
    "max_queue": 10**9,
    "hold_s": WEEK_S,
    "max_choices": 10**9,
    "request_timeout_s": WEEK_S,
    "probe_interval_s": WEEK_S,
    "shutdown_grace_s": WEEK_S,
}
"""Clocks and counters of libraries can hold these, and whoever wants no limit needs no more."""


@dataclass(frozen=True)
class ModelSource:
    """One model that a router serves."""

    name: str
    """What clients call it and, where a router has several, what its servers say that they serve."""
    directory: Path
    """Folder with tokenizer.json; weights are not read."""

    def __str__(self) -> str:
        return f"{self.name}={self.directory}"


@dataclass(frozen=True)
class ModelAlias:
    """Another name of a model."""

    name: str
    model: str

    def __str__(self) -> str:
        return f"{self.name}={self.model}"


WORKER_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
"""A name or an address, of IPv6 in brackets. gRPC has kinds of addresses of its own: ``unix:``, ``ipv4:``."""
MAX_ADDRESS_CHARS = 262
"""The longest name of a host, a colon and a port."""


def check_address(address: str) -> None:
    """Raises :class:`ConfigError` for what is no ``host:port``."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    if len(address) > MAX_ADDRESS_CHARS or not WORKER_HOST.fullmatch(host) or not is_port:
        raise ConfigError(
            f"server address {address[:MAX_ADDRESS_CHARS]!r} is not host:port, with a port from 1 to 65535"
        )


ROLE_LABEL = "twinfang.io/role"
"""``prefill`` or ``decode``; a server that does both is a decode server."""

NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS label: RFC 1123, section 2.1."""


@dataclass(frozen=True)
class PodDiscovery:
    """Which pods are servers. Raises :class:`ConfigError` for values that can't work."""

    namespace: str
    selector: str = ROLE_LABEL
    """Label selector in Kubernetes' own notation."""
    kubeconfig: Path | None = None
    """None: the service account of the pod that this process runs in."""

    def __post_init__(self) -> None:
        if not NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(
                f"kubernetes_namespace {self.namespace!r} is no name of a namespace: at most 63 lower-case "
                "letters, digits and hyphens, as in --kubernetes-namespace twinfang"
            )
        if not self.selector:
            raise ConfigError("kubernetes_selector is empty: give labels, as in --kubernetes-selector a=b")


@dataclass(frozen=True)
class ProcessPlace:
    """Which one a router is of several processes on one port."""

    index: int
    ports: tuple[int, ...]
    """On loopback, where each process can be reached alone."""

    @property
    def own_port(self) -> int:
        return self.ports[self.index]

    def __str__(self) -> str:
        return f"{self.index}:{','.join(map(str, self.ports))}"


@dataclass(frozen=True)
class RouterConfig:
    """All settings of one router. Raises :class:`ConfigError` for values that can't work."""

    models: tuple[ModelSource, ...]
    """The only model takes whatever servers there are; of several, each those that announce its name."""
    decode_addresses: tuple[str, ...]
    """``host:port`` of decode servers, or of servers that do both."""
    prefill_addresses: tuple[str, ...] = ()
    """``host:port`` of prefill servers; none are needed where every decode server does both."""
    pods: PodDiscovery | None = None
    """Pods that are servers too, as long as they are there and ready; None: pods are not looked at."""
    aliases: tuple[ModelAlias, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    """Of a request's URL and headers."""
    max_requests_in_flight: int = 1024
    """Choices of one model at one time, if servers have room for so many."""
    max_queue: int = 1024
    """HTTP requests that wait for one model; one more is answered 429."""
    hold_s: float = 15.0
    """How long requests, and answers under way, wait for a server that is expected back; 0: not at all."""
    max_choices: int = 512
    """Prompts times ``n`` of one request."""
    request_timeout_s: float = 600.0
    """From the request's arrival to its last token."""
    conversation_return: bool = False
    """Have decode servers keep an answer's state, so that the next turn computes its new tokens alone."""
    prefill_policy: PolicyName = "prefix_affinity"
    """How a prompt's prefill server is chosen."""
    decode_policy: PolicyName = "least_loaded"
    tool_call_parser: ToolParserName = "auto"
    """How models write calls of tools; ``auto`` sees it in their chat templates."""
    otlp_endpoint: str = ""
    """Where traces go: a collector's base URL; empty: where the OTEL_* variables say, if they do."""
    session_header: str = ""
    """Requests with equal values of this HTTP header go to the same servers; empty: none do."""
    probe_interval_s: float = 2.0
    """Between two looks at a server that is not streaming to us."""
    admin_token_file: Path | None = None
    """Holds the token of the admin API; None: there is no admin API."""
    allow_link_local_workers: bool = False
    """Whether the admin API may add servers at link-local addresses and where clouds keep metadata."""
    place: ProcessPlace | None = None
    """Where ``--workers`` runs several processes; None: this one is alone on its port."""
    state_file: Path | None = None
    """Keeps what was changed through the admin API, which a router that starts goes on from."""
    api_keys_file: Path | None = None
    """Who may send requests, see :mod:`router.access.key_file`; None: everybody."""
    cors_origins: tuple[str, ...] = ()
    """Pages of these origins may use the API from a browser; ``*``: all. None may otherwise."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may have for this router besides those of loopback, ``*.example.com`` for all below
    one; ``*``: any. Without any, a router that is bound to loopback goes by loopback's names alone."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Addresses and networks of proxies whose ``X-Forwarded-For`` says which client a request is from."""
    shutdown_grace_s: float = 10.0
    """How long answers that are under way may take after SIGTERM."""

    def __post_init__(self) -> None:
        self._check_names()
        if not self.decode_addresses and self.pods is None:
            raise ConfigError(
                "a router needs at least one decode server: --decode host:port, or --kubernetes-namespace NS "
                "to find those that are pods"
            )
        for address in (*self.prefill_addresses, *self.decode_addresses):
            check_address(address)
        for addresses in (self.prefill_addresses, self.decode_addresses):
            if len(set(addresses)) != len(addresses):
                raise ConfigError(f"an address is given twice: {', '.join(addresses)}")
        if self.session_header and not HEADER_NAME.fullmatch(self.session_header):
            raise ConfigError(f"session_header {self.session_header!r} is no name of an HTTP header")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in (
            "max_body_bytes",
            "max_header_bytes",
            "max_requests_in_flight",
            "max_choices",
            "request_timeout_s",
            "probe_interval_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_queue", "hold_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name, limit in HIGHEST.items():
            if getattr(self, name) > limit:
                raise ConfigError(f"{name} must be at most {limit}, got {getattr(self, name)}: give less")
        for name in self.allowed_hosts:
            if name != "*" and not ALLOWED_HOST.fullmatch(name):
                raise ConfigError(
                    f"allowed_host {name!r} is no name of a host: give it without scheme and port, as in "
                    "api.example.com, *.example.com for all below a name, or * for any"
                )
        for proxy in self.forwarded_allow_ips:
            _check_proxy(proxy)
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin {origin!r} is no origin: give scheme and host, and no path, as in "
                    "https://chat.example.com, or * for all"
                )

    def _check_names(self) -> None:
        if not self.models:
            raise ConfigError("a router needs at least one model: --model NAME=DIR")
        models = [source.name for source in self.models]
        names = [*models, *(alias.name for alias in self.aliases)]
        for name in names:
            if not name:
                raise ConfigError("a model or alias has an empty name: --model NAME=DIR, --alias NAME=MODEL")
            if names.count(name) > 1:
                raise ConfigError(f"{name!r} names two models or aliases: give each a name of its own")
        for alias in self.aliases:
            if alias.model not in models:
                known = ", ".join(map(repr, models))
                raise ConfigError(f"alias {alias.name!r} is for {alias.model!r}, which is none of {known}")


def _check_proxy(text: str) -> None:
    try:
        ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"forwarded_allow_ips {text!r} is no address and no network ({error}): give one each time, as in "
            "10.0.0.5, 10.0.0.0/8 or fd00::/8"
        ) from error


CHANGEABLE = (
    "prefill_policy",
    "decode_policy",
    "session_header",
    "max_requests_in_flight",
    "max_queue",
    "hold_s",
    "max_choices",
    "request_timeout_s",
)
"""Fields of :class:`RouterConfig` that may change while the router runs."""


class LiveConfig:
    """Whoever keeps something that is made of a setting is told of changes; all others read it each time."""

    def __init__(self, config: RouterConfig) -> None:
        self.current = config
        self._listeners: list[Callable[[RouterConfig], None]] = []

    def on_change(self, tell: Callable[[RouterConfig], None]) -> None:
        self._listeners.append(tell)

    def change(self, values: Mapping[str, Any]) -> None:
        """All of them or none. Raises :class:`InvalidRequestError` for what could not be a flag's value."""
        try:
            self.current = with_changes(self.current, values)
        except ConfigError as error:
            raise InvalidRequestError(f"the settings stay as they were: {error.message}") from error
        for tell in self._listeners:
            tell(self.current)


def with_changes(config: RouterConfig, values: Mapping[str, Any]) -> RouterConfig:
    """Raises :class:`ConfigError` for a value that can't work or a name not in :data:`CHANGEABLE`."""
    for name in values:
        if name not in CHANGEABLE:
            raise ConfigError(f"{name!r} can't be changed while the router runs: {', '.join(CHANGEABLE)} can")
    return replace(config, **values)


assert set(CHANGEABLE) <= {field.name for field in fields(RouterConfig)}
