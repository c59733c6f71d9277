"""Puts the router together."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from router import chat, completions, model_list, probes, tokenization
from router.access.authentication import AuthenticationMiddleware
from router.access.key_file import KeyFile
from router.admin.admin_token import AdminToken
from router.admin.api import add_admin_api
from router.admin.changes import Changes
from router.admin.event_feed import EventFeed
from router.admin.state_file import SavedChanges, StateFile
from router.admin_ui import pages
from router.admission.gate import Gate, GateLimits
from router.api_schemas import ERRORS
from router.background import OnFatal, cancel_and_wait, start_background
from router.body_limit import BodyLimitMiddleware
from router.config import RouterConfig
from router.direct_routes import DirectRoutes
from router.drain import Drain, DrainMiddleware
from router.live_config import LiveConfig
from router.membership import Membership
from router.metrics import Metrics
from router.model_catalog import ModelCatalog, ServedModel
from router.model_folder import ModelFolder
from router.model_servers import ModelServers
from router.openai_errors import install_error_handlers
from router.recent_figures import RecentFigures
from router.request_id import RequestIdMiddleware
from router.request_log import RequestLog
from router.server_pool import ServerPool
from router.services import Services
from router.tool_calls.format_names import tool_format
from telemetry.tracing import start_tracing

if TYPE_CHECKING:
    from router.kubernetes.pod_watch import PodWatch


def end_process(_error: BaseException) -> None:
    """Lets the HTTP server shut down in order; whoever supervises the process starts it again."""
    signal.raise_signal(signal.SIGTERM)


def create_app(config: RouterConfig, *, on_fatal: OnFatal = end_process) -> FastAPI:
    """The application. Raises :class:`ConfigError` if it can't work, a :class:`ModelLoadError` if that is
    for a model folder's tokenizer or chat template.

    ``on_fatal`` is told if a background task dies of an unexpected error.
    """
    key_file = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
    drain = Drain()
    make_pod_watch = _pod_watch_maker(config)
    folders = {source.name: ModelFolder.read(source) for source in config.models}

    token = None if config.admin_token_file is None else AdminToken.from_file(config.admin_token_file)
    state_file = None if config.state_file is None else StateFile(config.state_file)
    saved = SavedChanges() if state_file is None else state_file.load()
    config = saved.applied_to(config)

    tracing = start_tracing(
        "twinfang-router", secrets.token_hex(8), endpoint=config.otlp_endpoint, environment=os.environ
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pool = ServerPool(config)  # channels belong to the running event loop
        models = [_served(name, folder, pool.models[name], config) for name, folder in folders.items()]
        membership = Membership(pool)
        pods = None if make_pod_watch is None else make_pod_watch(membership)
        settings = LiveConfig(config)
        settings.on_change(pool.use_policies)
        for model in models:
            settings.on_change(model.gate.use_limits)
        services = app.state.services = Services(
            settings=settings,
            models=ModelCatalog(models, config.aliases),
            pool=pool,
            metrics=Metrics(),
            drain=drain,
            key_file=key_file,
            requests=RequestLog(),
            recent=RecentFigures(),
            created=int(time.time()),
            tracing=tracing,
            pods=pods,
        )
        changes = app.state.changes = Changes(pool, membership, settings, state_file)
        changes.restore(saved)
        pool.start(on_fatal)
        if pods is not None:
            services.metrics.registry.register(pods.figures)
            pods.start(on_fatal)
        feed = app.state.event_feed = EventFeed(services)
        watching = [start_background(feed.run(), "admin events", on_fatal)]
        if key_file is not None:
            watching.append(start_background(key_file.watch(), "watch of the API keys", on_fatal))
        try:
            yield
        finally:
            feed.close()
            if pods is not None:
                await pods.close()
            await cancel_and_wait(*watching)
            await pool.close()
            if state_file is not None:
                state_file.close()
            for folder in folders.values():
                folder.tokenizer.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    app = FastAPI(title="Twinfang", responses=ERRORS, docs_url=None, redoc_url=None, lifespan=lifespan)
    install_error_handlers(app)
    for module in (completions, chat, tokenization, model_list, probes):
        app.include_router(module.router)
    if token is not None:
        add_admin_api(app, token)
        app.include_router(pages.router)
    app.state.drain = drain
    _add_middleware(app, config, drain, key_file)
    return app


def _pod_watch_maker(config: RouterConfig) -> Callable[[Membership], PodWatch] | None:
    """What it needs is an extra, imported where it is used only. Raises :class:`ConfigError`."""
    if config.pods is None:
        return None
    from router.kubernetes.cluster import require_service_account
    from router.kubernetes.pod_watch import PodWatch

    if config.pods.kubeconfig is None:
        require_service_account()
    return partial(PodWatch, config.pods, config)


def _served(name: str, folder: ModelFolder, servers: ModelServers, config: RouterConfig) -> ServedModel:
    limits = GateLimits(config.max_requests_in_flight, config.max_queue)
    gate = Gate(limits, servers.room, lambda: servers.not_ready_reason() or "no server is there")
    servers.on_prefilled = gate.look
    return ServedModel(
        name,
        folder.tokenizer,
        folder.chat_template,
        folder.defaults,
        servers,
        gate,
        tool_format(config.tool_call_parser, folder.chat_template),
    )


def _add_middleware(app: FastAPI, config: RouterConfig, drain: Drain, key_file: KeyFile | None) -> None:
    """The last one added is the first one that a request meets."""
    endpoints = {
        "/v1/completions": completions.create_completion,
        "/v1/chat/completions": chat.create_chat_completion,
    }
    app.add_middleware(DirectRoutes, endpoints=endpoints)
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_body_bytes)
    if key_file is not None:
        app.add_middleware(AuthenticationMiddleware, key_file=key_file)
    app.add_middleware(DrainMiddleware, drain=drain)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestIdMiddleware)
