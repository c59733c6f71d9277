"""The settings of a router process. All are given at its start; some of them may change while it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal

from router.policies.policy_names import PolicyName
from wire.errors import ConfigError, InvalidRequestError
from wire.tls.identity_files import IdentityFiles
from wire.tls.key_pair_files import KeyPairFiles

ToolParserName = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "glm47",
    "granite",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "llama4_pythonic",
    "minimax",
    "minimax_m2",
    "mistral",
    "nemotron_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
]
ReasoningParserName = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "granite",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "nemotron_v3",
    "olmo3",
    "qwen3",
    "seed_oss",
]


CacheIsolation = Literal["key", "none"]
"""Who shares cached prompts: requests of one API key, or all requests."""

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A token of RFC 9110, section 5.6.2."""

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
"""An origin as browsers send it: RFC 6454, section 6.1."""

ALLOWED_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]+\]")
"""A host name; or ``*.`` and a name, which stands for all names below that name; or an address, in brackets
if it is an IPv6 address."""


LIMIT_STORE = re.compile(r"sqlite:.+|rediss?://\S+")
LIMIT_STORE_FORMS = "sqlite:FILE or redis://[[user]:password@]host:port/db (rediss:// for TLS)"

WEEK_S = 7 * 24 * 3600
HIGHEST = {
    "max_requests_in_flight": 10**9,
    "max_queue": 10**9,
    "hold_s": WEEK_S,
    "max_choices": 10**9,
    "request_timeout_s": WEEK_S,
    "probe_interval_s": WEEK_S,
    "shutdown_grace_s": WEEK_S,
    "response_store_bytes": 1 << 50,
    "response_store_ttl_s": 10 * 365 * 24 * 3600,
}
"""The highest values of settings. These values are so high that they limit nothing in practice, but clocks
and counters of libraries can still hold them."""


@dataclass(frozen=True)
class ModelSource:
    """One model that a router serves."""

    name: str
    """The model's name for clients. If a router has several models, a model's servers announce this name."""
    directory: Path
    """Folder with tokenizer.json. The router does not read weights."""

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
"""A host name or an address, in brackets if it is an IPv6 address. This excludes gRPC's own kinds of
addresses, such as ``unix:`` and ``ipv4:``."""
MAX_ADDRESS_CHARS = 262
"""The length of the longest host name, a colon and a port."""


def check_address(address: str) -> None:
    """Raise :class:`ConfigError` if ``address`` is not ``host:port``."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    if len(address) > MAX_ADDRESS_CHARS or not WORKER_HOST.fullmatch(host) or not is_port:
        raise ConfigError(
            f"server address {address[:MAX_ADDRESS_CHARS]!r} is not host:port, with a port from 1 to 65535"
        )


@dataclass(frozen=True)
class TokenIssuer:
    """Who signs bearer tokens, and what their claims mean. Raises :class:`ConfigError` for values that can't
    work."""

    issuer: str
    """The issuer's URL, exactly as its tokens name it."""
    audience: str
    """What tokens for this router name as their audience."""
    keys: str = ""
    """The file or the address of the issuer's public keys. Empty: its OpenID configuration names them."""
    tenant_claim: str = "sub"
    """Requests of tokens with equal values of this claim are those of one client."""
    priority_claim: str = "twinfang_min_priority"
    limits_claim: str = "twinfang_limits"
    role_claim: str = "twinfang_role"

    def __post_init__(self) -> None:
        for name in ("issuer", "audience", "tenant_claim", "priority_claim", "limits_claim", "role_claim"):
            if not getattr(self, name):
                raise ConfigError(f"`jwt_{name}` is empty: give a value, or leave the flag out")


ROLE_LABEL = "twinfang.io/role"
"""The pod label that says ``prefill`` or ``decode``; a server that does both is a decode server."""

NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A DNS label: RFC 1123, section 2.1."""


@dataclass(frozen=True)
class PodDiscovery:
    """Which pods are servers. Raises :class:`ConfigError` for values that can't work."""

    namespace: str
    selector: str = ROLE_LABEL
    """The label selector that finds the pods, in Kubernetes' notation."""
    kubeconfig: Path | None = None
    """None: use the service account of the pod that this process runs in."""

    def __post_init__(self) -> None:
        if not NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(
                f"kubernetes_namespace {self.namespace!r} is no name of a namespace: give at most 63 "
                "lower-case letters, digits and hyphens, as in --kubernetes-namespace twinfang"
            )
        if not self.selector:
            raise ConfigError("kubernetes_selector is empty: give labels, as in --kubernetes-selector a=b")


@dataclass(frozen=True)
class ProcessPlace:
    """The place of this router process among several that share one port."""

    index: int
    ports: tuple[int, ...]
    """The processes' own ports on loopback, where each process can be reached separately."""
    secret: str = field(default="", repr=False)
    """What the processes show one another when one asks another for what the admin API needs. Empty: they
    don't ask, so such a process has no admin API."""

    @property
    def own_port(self) -> int:
        return self.ports[self.index]

    def __str__(self) -> str:
        return f"{self.index}:{','.join(map(str, self.ports))}"


@dataclass(frozen=True)
class RouterConfig:
    """All settings of one router. Raises :class:`ConfigError` for values that can't work."""

    models: tuple[ModelSource, ...]
    """A single model uses all servers. Of several models, each uses the servers that announce its name."""
    decode_addresses: tuple[str, ...]
    """``host:port`` of decode servers, or of servers that do both."""
    prefill_addresses: tuple[str, ...] = ()
    """``host:port`` of prefill servers; none are needed if every decode server does both."""
    pods: PodDiscovery | None = None
    """Which pods are used as further servers, while they exist and are ready. None: the router does not look
    for pods."""
    aliases: tuple[ModelAlias, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    certificate: KeyPairFiles | None = None
    """The certificate for HTTPS. None: the router speaks HTTP."""
    identity: IdentityFiles | None = None
    """Files for mutual TLS with servers. None: the router talks to them in clear."""
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    """The limit of a request's URL and headers together."""
    max_requests_in_flight: int = 1024
    """The maximum number of choices of one model in flight, if the servers have room for so many."""
    max_queue: int = 1024
    """The maximum number of HTTP requests that wait for one model; the router answers further requests with
    429."""
    hold_s: float = 15.0
    """How long requests, and answers in progress, wait for a server that is expected back; 0: not at all."""
    max_choices: int = 512
    """The maximum number of choices of one request: the number of its prompts times ``n``."""
    request_timeout_s: float = 600.0
    """The maximum time from a request's arrival to its last token."""
    conversation_return: bool = False
    """Whether decode servers keep an answer's state, so that the conversation's next turn only has to compute
    its new tokens."""
    prefill_policy: PolicyName = "prefix_affinity"
    """How a prompt's prefill server is chosen."""
    decode_policy: PolicyName = "least_loaded"
    tool_call_parser: ToolParserName = "auto"
    """How models write tool calls; ``auto``: the router finds this out from the models' chat templates."""
    reasoning_parser: ReasoningParserName = "auto"
    """How models mark their thinking; ``auto``: the router finds this out from the models' chat templates."""
    otlp_endpoint: str = ""
    """Where to send traces: a collector's base URL. Empty: the OTEL_* variables decide, if they are set."""
    session_header: str = ""
    """Requests with equal values of this HTTP header go to the same servers. Empty: there are no sessions."""
    probe_interval_s: float = 2.0
    """Time between two probes of a server that is not streaming to the router."""
    admin_token_file: Path | None = None
    """The file with the token of the admin API; None: there is no admin API."""
    allow_link_local_workers: bool = False
    """Whether the admin API may add servers at link-local addresses and at the addresses of clouds' metadata
    services."""
    place: ProcessPlace | None = None
    """The place of this process among those that ``--workers`` starts; None: this process is alone on its
    port."""
    state_file: Path | None = None
    """The file that keeps the changes made through the admin API. A router applies these changes when it
    starts."""
    api_keys_file: Path | None = None
    """The file that says who may send requests, see :mod:`router.access.key_file`; None: everybody may."""
    token_issuer: TokenIssuer | None = None
    """Whose bearer tokens may be sent instead of API keys; None: nobody's."""
    metrics_need_role: bool = False
    """Whether ``/metrics`` needs the role ``view``. If not, everybody may read them, without figures of
    keys."""
    audit_log: Path | None = None
    """The file that keeps who did what; None: nothing is kept."""
    cache_isolation: CacheIsolation = "key"
    """Who shares cached prompts: requests of one API key, or all requests with the same ``cache_salt``."""
    limit_store: str = ""
    """Where the limits of API keys are counted: ``sqlite:FILE`` or ``redis://host:port/db``. Empty: in this
    process's memory."""
    cors_origins: tuple[str, ...] = ()
    """Pages of these origins may use the API from a browser; ``*``: pages of all origins. Other pages may
    not."""
    allowed_hosts: tuple[str, ...] = ()
    """The host names, in addition to those of loopback, by which requests may address this router;
    ``*.example.com``: all names below example.com; ``*``: any name. If no names are given, a router that is
    bound to loopback accepts only loopback's names."""
    forwarded_allow_ips: tuple[str, ...] = ()
    """Addresses and networks of proxies whose ``X-Forwarded-For`` says which client a request is from."""
    response_store: Path | None = None
    """The file that keeps responses of ``/v1/responses``; None: they are not kept."""
    response_store_bytes: int = 1 << 30
    """How much all stored responses may take together. One of them may take a sixteenth."""
    response_store_ttl_s: float = 30 * 24 * 3600.0
    """How long a response is kept after it was made or last continued."""
    shutdown_grace_s: float = 10.0
    """How long answers in progress may continue after SIGTERM."""

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
                raise ConfigError(
                    f"a server address is given twice: {', '.join(addresses)}: give each one once"
                )
        if self.session_header and not HEADER_NAME.fullmatch(self.session_header):
            raise ConfigError(
                f"session_header {self.session_header!r} is not a name of an HTTP header: give one like "
                "X-Session-Id"
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        for name in (
            "max_body_bytes",
            "max_header_bytes",
            "max_requests_in_flight",
            "max_choices",
            "request_timeout_s",
            "response_store_bytes",
            "response_store_ttl_s",
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
        if self.limit_store and not LIMIT_STORE.fullmatch(self.limit_store):
            raise ConfigError(
                f"limit_store has the wrong form: give {LIMIT_STORE_FORMS}"  # it may contain a password
            )
        for name in self.allowed_hosts:
            if name != "*" and not ALLOWED_HOST.fullmatch(name):
                raise ConfigError(
                    f"allowed_host {name!r} is not a host name: give it without scheme and port, as in "
                    "api.example.com, *.example.com for all names below example.com, or * for any name"
                )
        for proxy in self.forwarded_allow_ips:
            _check_proxy(proxy)
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin {origin!r} is not an origin: give scheme and host, without a path, as in "
                    "https://chat.example.com, or * for all origins"
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
                raise ConfigError(f"{name!r} names two models or aliases: give each of them another name")
        for alias in self.aliases:
            if alias.model not in models:
                known = ", ".join(map(repr, models))
                raise ConfigError(
                    f"alias {alias.name!r} is for {alias.model!r}, which this router does not have: "
                    f"its models are {known}"
                )


def _check_proxy(text: str) -> None:
    try:
        ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"forwarded_allow_ips {text!r} is neither an address nor a network ({error}): give one each "
            "time, as in 10.0.0.5, 10.0.0.0/8 or fd00::/8"
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
    """The settings as they are now. Objects that keep a value derived from a setting are notified of changes
    through :meth:`on_change`; all other code reads :attr:`current` each time it needs a setting."""

    def __init__(self, config: RouterConfig) -> None:
        self.current = config
        self._listeners: list[Callable[[RouterConfig], None]] = []

    def on_change(self, tell: Callable[[RouterConfig], None]) -> None:
        self._listeners.append(tell)

    def change(self, values: Mapping[str, Any]) -> None:
        """Change all of ``values`` or none of them. Raises :class:`InvalidRequestError` for a value that the
        setting's flag would not accept."""
        try:
            self.current = with_changes(self.current, values)
        except ConfigError as error:
            raise InvalidRequestError(f"the settings stay as they were: {error.message}") from error
        for tell in self._listeners:
            tell(self.current)


def with_changes(config: RouterConfig, values: Mapping[str, Any]) -> RouterConfig:
    """Return ``config`` with changed ``values``. Raises :class:`ConfigError` for a value that can't work or a
    name not in :data:`CHANGEABLE`."""
    for name in values:
        if name not in CHANGEABLE:
            raise ConfigError(
                f"{name!r} can't be changed while the router runs; these can: {', '.join(CHANGEABLE)}"
            )
    return replace(config, **values)


assert set(CHANGEABLE) <= {one.name for one in fields(RouterConfig)}
