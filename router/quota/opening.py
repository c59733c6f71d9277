"""Opens the store of limits that a setting names."""

from __future__ import annotations

import logging
from pathlib import Path

from router.access.api_keys import ApiKeys
from router.quota.limit_store import LimitStore
from router.quota.limiter import Limiter, OwnLimiter
from router.quota.metrics import StoreMetrics
from router.quota.shared_limiter import SharedLimiter
from router.quota.sqlite_store import SqliteStore
from wire.errors import ConfigError

log = logging.getLogger(__name__)

SQLITE = "sqlite:"


def open_limiter(address: str, metrics: StoreMetrics, keys: ApiKeys | None) -> Limiter:
    """Return what admits requests, with the store at ``address``, or with this process's memory if that is
    empty. Raises :class:`ConfigError`."""
    if address:
        return SharedLimiter(_open(address), metrics)
    if keys is not None and any(key.limits is not None and key.limits.has_budget for key in keys):
        log.warning(
            "API keys have budgets, but there is no --limit-store: budgets begin again whenever this router "
            "starts"
        )
    return OwnLimiter()


def check_store(address: str) -> None:
    """Raise :class:`ConfigError` if :func:`open_limiter` would. A Redis server that is down is no error: it
    may come back."""
    if address.startswith(SQLITE):
        SqliteStore(Path(address.removeprefix(SQLITE))).close_now()
    elif address:
        _open(address)


def _open(address: str) -> LimitStore:
    if address.startswith(SQLITE):
        return SqliteStore(Path(address.removeprefix(SQLITE)))
    try:
        from router.quota.redis_store import RedisStore  # an optional extra
    except ImportError as error:
        raise ConfigError(
            "a `limit_store` in Redis needs a Python package: pip install 'twinfang[redis]'"
        ) from error
    try:
        return RedisStore(address)
    except ValueError:
        raise ConfigError(
            "the address of the Redis server in `limit_store` is wrong: give "
            "redis://[[user]:password@]host:port/db, with %xx for other characters in a password"
        ) from None  # the error may have a part of the password
