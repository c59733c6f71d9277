"""The headers that tell a client what is left of its key's rates: OpenAI's names, or Anthropic's."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from router.access.key_limits import KeyLimits
from router.quota.account import MINUTE_S
from router.quota.limit_store import Standing

OPENAI_NAMES = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
ANTHROPIC_NAMES = tuple(
    f"anthropic-ratelimit-{of}-{what}"
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
ANTHROPIC_PATH = "/v1/messages"


def rate_headers(path: str, limits: KeyLimits, standing: Standing) -> dict[str, str]:
    """Return the headers for an answer on ``path``. A rate without a limit has none. ``reset`` is when the
    whole rate will be free again."""
    headers: dict[str, str] = {}
    for of, limit, remaining, reset_s in _rates(limits, standing):
        if path == ANTHROPIC_PATH:
            prefix = f"anthropic-ratelimit-{of}-"
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(math.ceil(standing.now_s + reset_s)))
            headers |= {
                f"{prefix}limit": str(limit),
                f"{prefix}remaining": str(remaining),
                f"{prefix}reset": at,
            }
        else:
            headers[f"x-ratelimit-limit-{of}"] = str(limit)
            headers[f"x-ratelimit-remaining-{of}"] = str(remaining)
            headers[f"x-ratelimit-reset-{of}"] = duration(reset_s)
    return headers


def _rates(limits: KeyLimits, standing: Standing) -> Iterator[tuple[str, int, int, float]]:
    for of, limit, spent in (
        ("requests", limits.requests_per_minute, standing.requests_spent),
        ("tokens", limits.tokens_per_minute, standing.tokens_spent),
    ):
        if limit is not None:
            yield of, limit, max(0, math.floor(limit - spent)), spent * MINUTE_S / limit


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: ``6m0s``, ``1s``, ``20ms``."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    whole, rest = divmod(milliseconds, 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    text = f"{whole}.{rest:03}".rstrip("0").rstrip(".") + "s"
    text = f"{minutes}m{text}" if minutes or hours else text
    return f"{hours}h{text}" if hours else text
