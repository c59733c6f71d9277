"""What a router keeps from its start to its end. All of it is read or created before the router serves
requests."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from router.config import RouterConfig, TokenIssuer
from router.fleet.pool_membership import Membership
from router.http.drain import Drain
from telemetry.tracing import start_tracing

if TYPE_CHECKING:
    from router.access.certificate import Certificate
    from router.access.tokens.bearer_tokens import BearerTokens
    from router.access.tokens.issuer_keys import IssuerKeys
    from router.kubernetes.pod_watch import PodWatch
    from telemetry.otel import Tracing
    from wire.tls.identity import Identity


from collections.abc import Mapping

from router.access.credentials import Credentials
from router.access.key_file import KeyFile
from router.admin.admin_token import AdminToken
from router.admin.state_file import SavedChanges, StateFile
from router.api.responses.response_file import ResponseFile
from router.api.responses.response_store import NoStore, ResponseStore
from router.audit.audit_log import Audit, AuditLog, NoAudit
from router.audit.chain_file import ChainFile
from router.models.folder import ModelFolder
from router.quota.opening import check_store
from wire.errors import ConfigError


@dataclass(frozen=True)
class Files:
    """The contents of the files that settings name. A command that starts a router together with other
    processes reads these files first, so that it fails before those processes start."""

    config: RouterConfig
    """The settings, with the changes that the state file has kept."""
    key_file: KeyFile | None
    model_folders: Mapping[str, ModelFolder]
    """Keys: the names that the models are served under."""
    credentials: Credentials
    """Who may do what."""
    issuer_keys: IssuerKeys | None
    """The keys of bearer tokens; None: there is no issuer."""
    state_file: StateFile | None
    saved: SavedChanges
    response_store: ResponseStore
    certificate: Certificate | None
    audit_file: ChainFile | None
    identity: Identity | None

    @classmethod
    def read(cls, config: RouterConfig) -> Files:
        """Read the files. Raises :class:`ConfigError`, or :class:`ModelLoadError` for a tokenizer, a chat
        template or a generation config."""
        key_file = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
        folders = {source.name: ModelFolder.read(source) for source in config.models}
        token = None if config.admin_token_file is None else AdminToken.from_file(config.admin_token_file)
        tokens = None if config.token_issuer is None else _bearer_tokens(config.token_issuer)
        credentials = Credentials(key_file, tokens, None if token is None else token.matches)
        if config.metrics_need_role and not credentials.give_roles:
            raise ConfigError(
                "`metrics_need_role` is on, and nobody has a role: give an admin token, an issuer of tokens, "
                "or an API key with role=view"
            )
        state_file = None if config.state_file is None else StateFile(config.state_file)
        saved = SavedChanges() if state_file is None else state_file.load()
        check_store(config.limit_store)
        certificate = _certificate(config)
        store = _response_store(config)
        identity = _identity(config)
        return cls(
            saved.applied_to(config),
            key_file,
            folders,
            credentials,
            None if tokens is None else tokens.keys,
            state_file,
            saved,
            store,
            certificate,
            None if config.audit_log is None else ChainFile(config.audit_log),
            identity,
        )

    def close(self) -> None:
        if self.state_file is not None:
            self.state_file.close()
        self.response_store.close()
        if self.audit_file is not None:
            self.audit_file.close()
        for folder in self.model_folders.values():
            folder.tokenizer.close()


@dataclass(frozen=True)
class Resources:
    """Files, tokenizers and traces of one router."""

    files: Files
    drain: Drain
    make_pod_watch: Callable[[Membership], PodWatch] | None
    tracing: Tracing | None
    audit: Audit

    @classmethod
    def open(cls, config: RouterConfig) -> Resources:
        """Read files and start tracing. Raises :class:`ConfigError`, and what :meth:`Files.read` raises."""
        make_pod_watch = _pod_watch_maker(config)
        files = Files.read(config)
        tracing = start_tracing(
            "twinfang-router", secrets.token_hex(8), endpoint=config.otlp_endpoint, environment=os.environ
        )
        place, file = config.place, files.audit_file
        audit = NoAudit() if file is None else AuditLog(file, 0 if place is None else place.index)
        return cls(files, Drain(), make_pod_watch, tracing, audit)

    async def close(self) -> None:
        self.files.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def _bearer_tokens(issuer: TokenIssuer) -> BearerTokens:
    """Return the check of an issuer's tokens. Its library is imported only here. Raises
    :class:`ConfigError`."""
    from router.access.tokens.bearer_tokens import BearerTokens
    from router.access.tokens.issuer_keys import IssuerKeys

    return BearerTokens(issuer, IssuerKeys.of(issuer))


def _certificate(config: RouterConfig) -> Certificate | None:
    """Return the certificate for HTTPS. Its library takes a while to import, which a router without HTTPS is
    spared. Raises :class:`ConfigError`."""
    if config.certificate is None:
        return None
    from router.access.certificate import Certificate

    return Certificate(config.certificate)


def _identity(config: RouterConfig) -> Identity | None:
    """Return the identity for mutual TLS with servers. Raises :class:`ConfigError`."""
    if config.identity is None:
        return None
    from wire.tls.identity import Identity

    return Identity(config.identity, "router")


def _response_store(config: RouterConfig) -> ResponseStore:
    """Return the open store. Raises :class:`ConfigError`."""
    if config.response_store is None:
        return NoStore()
    store = ResponseFile(
        config.response_store, max_bytes=config.response_store_bytes, ttl_s=config.response_store_ttl_s
    )
    store.open()
    return store


def _pod_watch_maker(config: RouterConfig) -> Callable[[Membership], PodWatch] | None:
    """Return the function that creates the watch of pods; None if pods are not watched. The watch's
    dependencies are an optional extra, so they are only imported in this function. Raises
    :class:`ConfigError`."""
    if config.pods is None:
        return None
    from router.kubernetes.cluster import require_service_account
    from router.kubernetes.pod_watch import PodWatch

    if config.pods.kubeconfig is None:
        require_service_account()
    return partial(PodWatch, config.pods, config)
