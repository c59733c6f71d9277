"""What each API key was used for, as the admin API shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pydantic import BaseModel

from router.access.api_keys import ApiKey
from router.serving.services import Services

MAX_KEYS = 1000
"""Maximum number of keys that are shown: those with the most tokens."""


class KeyLimit(BaseModel):
    """A limit of a key, and how much of it is used."""

    name: str
    used: float
    limit: float


class KeyView(BaseModel):
    """Requests and tokens of one key since the router processes started."""

    name: str
    requests: dict[str, int]
    """HTTP requests for text by outcome: completed, cancelled, refused (4xx), failed (5xx)."""
    prompt_tokens: int
    """Each prompt counts once, however many choices it has."""
    cached_tokens: int
    """The part of the prompt tokens that a prefix cache held."""
    generated_tokens: int
    limits: list[KeyLimit] = []
    """Empty: the key has no limits."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.generated_tokens


def key_views(services: Services) -> list[KeyView]:
    """Return the keys that may be used now and those that were used, the ones with the most tokens first."""
    used = services.metrics.keys.usage()
    keys = {} if services.key_file is None else {key.name: key for key in services.key_file.keys}
    names = used.keys() | keys.keys()
    views = []
    for name in names:
        requests, tokens = used.get(name, ({}, {}))
        views.append(
            KeyView(
                name=name,
                requests=requests,
                prompt_tokens=tokens.get("prompt", 0),
                cached_tokens=tokens.get("cached", 0),
                generated_tokens=tokens.get("generation", 0),
                limits=_limits_of(keys[name], services) if name in keys else [],
            )
        )
    return _most_used(views)


def merged_keys(views: Iterable[KeyView]) -> list[KeyView]:
    """Add up the views that several processes have of the same keys."""
    by_name: dict[str, list[KeyView]] = {}
    for view in views:
        by_name.setdefault(view.name, []).append(view)
    return _most_used(_sum(name, same) for name, same in by_name.items())


def _sum(name: str, views: list[KeyView]) -> KeyView:
    requests: Counter[str] = Counter()
    for view in views:
        requests.update(view.requests)
    return KeyView(
        name=name,
        requests=dict(requests),
        prompt_tokens=sum(view.prompt_tokens for view in views),
        cached_tokens=sum(view.cached_tokens for view in views),
        generated_tokens=sum(view.generated_tokens for view in views),
        limits=_merged_limits(view.limits for view in views),
    )


def _limits_of(key: ApiKey, services: Services) -> list[KeyLimit]:
    used = services.quota.used_of(key)
    return [KeyLimit(name=name, used=used[name], limit=limit) for name, limit in key.limits or ()]


def _merged_limits(views: Iterable[list[KeyLimit]]) -> list[KeyLimit]:
    """Return the limits as the process sees them that has heard last of the key's use."""
    by_name: dict[str, KeyLimit] = {}
    for limit in (limit for limits in views for limit in limits):
        known = by_name.get(limit.name)
        if known is None or limit.used > known.used:
            by_name[limit.name] = limit
    return list(by_name.values())


def _most_used(views: Iterable[KeyView]) -> list[KeyView]:
    return sorted(views, key=lambda view: (-view.tokens, view.name))[:MAX_KEYS]
