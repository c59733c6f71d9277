"""Creates the router's application: its endpoints, their entrance and the services that they share."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import Scope

from router.access.audited import note_refusal
from router.access.authentication import Authentication
from router.access.client import site_of
from router.access.credentials import Credentials
from router.access.cross_site import HostCheck, OriginCheck
from router.access.own_ports import OwnPorts
from router.admin.api import add_admin_api, add_process_api
from router.admin.changes import Changes
from router.admin.ledger import Ledger
from router.admin.processes.feed import EventFeed
from router.admin.processes.overview import Processes
from router.admin_ui import pages
from router.admission.gate import Gate, GateLimits
from router.admission.hold import Hold, watch
from router.api import description, probes, refused, sessions
from router.api.anthropic import errors as anthropic_errors
from router.api.anthropic import messages
from router.api.metrics_pages import MetricsPages
from router.api.openai import chat, completions, model_list, tokenization
from router.api.openai.schemas import ERRORS
from router.api.responses import creation, stored
from router.api.responses.own_responses import store_turns
from router.audit.audit_log import Audit, AuditLog
from router.background import OnFatal, cancel_and_wait, start_background
from router.config import LiveConfig, RouterConfig
from router.entrance import Checks, Entrance, RouterApp
from router.fleet.absence import Absence
from router.fleet.model_servers import ModelServers
from router.fleet.pool_membership import Membership
from router.fleet.server_pool import ServerPool
from router.http.bodies.body_room import BODIES_AT_ONCE, BodyRoom
from router.http.connections.open_connections import OpenConnections
from router.http.drain import Drain
from router.http.openai_errors import install_error_handlers
from router.http.refusals import Refusals
from router.models.catalog import ModelCatalog, ServedModel
from router.models.folder import ModelFolder
from router.models.grammar_checker import GrammarChecker
from router.models.reasoning.format_names import reasoning_format
from router.models.reasoning.model_reasoning import ModelReasoning
from router.models.tools.format_names import tool_format
from router.observe.last_minute import LastMinute
from router.observe.metrics import Metrics
from router.observe.request_log import RequestLog
from router.quota.opening import open_limiter
from router.quota.quota import Quota
from router.resources import Resources
from router.serving.dispatch import RETRIED
from router.serving.inbox import Backlog
from router.serving.services import Services
from router.serving.slice_lane import SliceLane
from telemetry.identity_expiry import IdentityExpiry
from telemetry.loop_lag import LoopLag
from wire.channels import channels_of
from wire.errors import TwinfangError
from wire.http.cross_site import AllowedHosts

if TYPE_CHECKING:
    from router.admin.processes.channel import Siblings

NOBODY = Absence("no server is ready", "no server is there")

REFUSAL_S = 1.0
"""This many seconds before the end of the shutdown grace, requests that still wait for a server are refused,
so that they get a proper error before their connections are cut."""


def end_process(_error: BaseException) -> None:
    """Make the HTTP server shut down in the normal way. The supervisor of the process is expected to restart
    the process."""
    signal.raise_signal(signal.SIGTERM)


def create_app(config: RouterConfig, *, on_fatal: OnFatal = end_process) -> FastAPI:
    """Create the application. Raises :class:`ConfigError` if a router can't work with ``config``, and
    :class:`ModelLoadError` if a model folder's tokenizer, chat template or generation config can't be used.

    ``on_fatal`` is called if a background task dies of an unexpected error.
    """
    resources = Resources.open(config)
    app = RouterApp(
        title="Twinfang",
        responses=ERRORS,
        openapi_url=None,  # :mod:`router.api.description` answers there
        docs_url=None,
        redoc_url=None,
        lifespan=partial(_serving, resources=resources, on_fatal=on_fatal),
    )
    forms = {anthropic_errors.PATH: anthropic_errors.ANTHROPIC_ERRORS}
    install_error_handlers(app, forms, Refusals(probes.PROBE_PATHS))
    endpoints = (completions, chat, messages, refused, creation, stored, tokenization, sessions, model_list)
    for module in (*endpoints, probes):
        app.include_router(module.router)
    app.include_router(description.router)
    credentials = resources.files.credentials
    if credentials.give_roles:
        add_admin_api(app, credentials, resources.audit)
        if config.place is not None and config.place.secret:
            add_process_api(app, config.place.secret, resources.audit)
        app.include_router(pages.router)
    app.state.drain = resources.drain
    app.state.connections = OpenConnections(site_of)
    app.state.metrics_pages = MetricsPages(app.state)
    app.state.description = None
    app.state.response_store = resources.files.response_store
    app.state.response_turns = store_turns()
    certificate = resources.files.certificate
    app.state.tls = None if certificate is None else certificate.context
    app.state.own_ports = OwnPorts.of(resources.files.identity)
    app.entrance = _entrance(app, resources)
    return app


@asynccontextmanager
async def _serving(app: FastAPI, *, resources: Resources, on_fatal: OnFatal) -> AsyncIterator[None]:
    """Run the application's services on the current event loop, which owns the gRPC channels."""
    config = resources.files.config
    identity = resources.files.identity
    pool = ServerPool(config, channels_of(identity))
    models = [
        _served(name, folder, pool.models[name], config, resources.drain)
        for name, folder in resources.files.model_folders.items()
    ]
    membership = Membership(pool)
    pods = None if resources.make_pod_watch is None else resources.make_pod_watch(membership)
    settings = LiveConfig(config)
    settings.on_change(pool.use_policies)
    for model in models:
        settings.on_change(model.gate.use_limits)
        settings.on_change(model.hold.use_limits)
    metrics, key_file = Metrics(RETRIED, [model.name for model in models]), resources.files.key_file
    keys = None if key_file is None else key_file.keys
    limiter = open_limiter(config.limit_store, metrics.quota.store, keys)
    services = app.state.services = Services(
        settings=settings,
        models=ModelCatalog(models, config.aliases),
        pool=pool,
        metrics=metrics,
        drain=resources.drain,
        key_file=key_file,
        credentials=resources.files.credentials,
        audit=resources.audit,
        quota=Quota(limiter, metrics.quota),
        grammars=GrammarChecker(),
        requests=RequestLog(),
        backlog=Backlog(),
        slices=SliceLane(),
        lag=LoopLag(),
        recent=LastMinute(),
        created=int(time.time()),
        tracing=resources.tracing,
        pods=pods,
    )
    services.metrics.registry.register(services.lag)
    services.metrics.registry.register(app.state.refusals)
    services.metrics.registry.register(app.state.connections)
    siblings = _siblings(config, resources.files.credentials, app.state.own_ports)
    ledger = Ledger(services.process)
    changes = app.state.changes = Changes(
        pool, membership, settings, resources.files.state_file, ledger, siblings
    )
    app.state.processes = Processes(services, lambda: changes.warning, siblings)
    changes.restore(resources.files.saved)
    await changes.catch_up()
    pool.start(on_fatal)
    for model in models:
        model.tokenizer.start()
    await asyncio.to_thread(int)  # starts a thread, as the tokenizers' threads are
    if pods is not None:
        services.metrics.registry.register(pods.metrics)
        pods.start(on_fatal)
    feed = app.state.event_feed = EventFeed(services, lambda: changes.warning)
    files = resources.files
    watching = [
        start_background(feed.run(), "admin events", on_fatal),
        start_background(watch([model.hold for model in models]), "watch for absences", on_fatal),
        start_background(files.response_store.keep_purging(), "expiry of responses", on_fatal),
        start_background(limiter.run(), "booking of keys' usage", on_fatal),
    ]
    if siblings is not None:
        watching.append(start_background(changes.keep_catching_up(), "changes of other processes", on_fatal))
    if files.state_file is not None:
        watching.append(start_background(files.state_file.keep_trying(), "state file", on_fatal))
    if files.key_file is not None:
        watching.append(
            start_background(files.key_file.watch(services.keys_changed), "watch of the API keys", on_fatal)
        )
    if isinstance(resources.audit, AuditLog):
        watching.append(start_background(resources.audit.run(), "audit log", on_fatal))
    if files.issuer_keys is not None:
        services.metrics.registry.register(files.issuer_keys)
        watching.append(start_background(files.issuer_keys.watch(), "keys of the token issuer", on_fatal))
    if files.certificate is not None:
        services.metrics.registry.register(files.certificate)
        watching.append(start_background(files.certificate.watch(), "watch of the certificate", on_fatal))
    if identity is not None:
        services.metrics.registry.register(IdentityExpiry(identity))
        watching.append(start_background(identity.watch(), "watch of the identity", on_fatal))
    try:
        yield
    finally:
        feed.close()
        services.lag.close()
        if pods is not None:
            await pods.close()
        await cancel_and_wait(*watching)
        await limiter.close()
        if files.issuer_keys is not None:
            await files.issuer_keys.close()
        await changes.close()
        if siblings is not None:
            await siblings.close()
        await pool.close()
        await services.grammars.close()
        await resources.close()


def _note_unauthorized(app: RouterApp, audit: Audit, scope: Scope, error: TwinfangError) -> None:
    app.state.services.metrics.unauthorized.inc()
    note_refusal(audit, scope, error)


def _siblings(config: RouterConfig, credentials: Credentials, own_ports: OwnPorts) -> Siblings | None:
    """Return the way to the other processes on this port; None if there are none, or there is no admin API
    that could ask them. Only then is an HTTP client imported."""
    place = config.place
    if place is None or not place.secret or not credentials.give_roles or len(place.ports) == 1:
        return None
    from router.admin.processes.channel import Siblings

    return Siblings(place, own_ports)


def _served(
    name: str, folder: ModelFolder, servers: ModelServers, config: RouterConfig, drain: Drain
) -> ServedModel:
    def is_stopping() -> bool:
        return drain.is_over(config.shutdown_grace_s - REFUSAL_S)

    thinking = reasoning_format(config.reasoning_parser, folder.chat_template)
    hold = Hold(servers, config, is_stopping=is_stopping)
    gate = Gate(
        GateLimits(config.max_requests_in_flight, config.max_queue, config.hold_s),
        servers.room,
        lambda: (servers.not_ready_reason() or NOBODY).error(),
        lambda: hold.may_end,
    )
    return ServedModel(
        name,
        folder.tokenizer,
        folder.chat_template,
        folder.defaults,
        servers,
        gate,
        hold,
        tool_format(config.tool_call_parser, folder.chat_template),
        None if thinking is None else ModelReasoning(thinking, folder.tokenizer),
    )


def _entrance(app: RouterApp, resources: Resources) -> Entrance:
    config = resources.files.config
    room = app.state.body_room = BodyRoom(BODIES_AT_ONCE * config.max_body_bytes)
    return Entrance(
        app.route,
        {
            "/v1/completions": completions.create_completion,
            "/v1/chat/completions": chat.create_chat_completion,
            "/v1/messages": messages.create_message,
            "/v1/responses": creation.create_response,
        },
        Checks(
            HostCheck(AllowedHosts.of(config.host, config.allowed_hosts)),
            OriginCheck(config.cors_origins),
            Authentication(resources.files.credentials, probes.OPEN_PATHS),
            on_unauthorized=partial(_note_unauthorized, app, resources.audit),
        ),
        drain=resources.drain,
        still_answered=(*probes.PROBE_PATHS, "/admin"),
        without_turn=probes.PATHS_WITHOUT_TURN,
        room=room,
        max_body_bytes=config.max_body_bytes,
        cors_origins=config.cors_origins,
    )
