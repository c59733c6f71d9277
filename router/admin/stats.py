"""``GET /admin/v1/stats``."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from pydantic import BaseModel

from router.observe.last_minute import LastMinute
from router.observe.window import WINDOW_S, WindowHistogram, WindowSum
from router.serving.services import Services, services_of


class Throughput(BaseModel):
    requests_per_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float


class Latency(BaseModel):
    """Measured times in milliseconds. Percentiles are null if nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None
    histogram: list[tuple[float, int]]
    """``[upper bound in ms, count]`` of buckets, ten for each decade."""

    @classmethod
    def of(cls, times: WindowHistogram, now_s: float) -> Latency:
        found = times.snapshot(now_s)
        shares = {f"p{round(100 * share)}": found.percentile_ms(share) for share in (0.5, 0.9, 0.99)}
        return cls(histogram=found.histogram, **shares)


class Transfer(BaseModel):
    bytes_per_s: float
    p50_ms: float | None
    p99_ms: float | None


class StatsView(BaseModel):
    at: float
    """The time of these values, in seconds since 1970."""
    window_s: int
    throughput: Throughput
    ttft_ms: Latency
    tpot_ms: Latency
    transfer: Transfer
    cache_hit_rate: float | None
    """The share of prompt tokens that a prefix cache held, over all choices that finished in the window."""
    accepted_draft_length: float | None
    """Tokens that a request gets from a step with drafts, on average. The one token of each step that is not
    a draft is counted, too. Null without speculation."""
    in_flight: int
    """Requests under way. Queued requests are not counted."""
    queued: int

    @classmethod
    def of(cls, services: Services) -> StatsView:
        recent = services.recent
        now_s = recent.now_s
        covered_s = recent.covered_s(now_s)

        def rate(what: WindowSum) -> float:
            return round(what.total(now_s) / covered_s, 3)

        moved = recent.transfer.snapshot(now_s)
        return cls(
            at=round(time.time(), 3),
            window_s=WINDOW_S,
            throughput=Throughput(
                requests_per_s=rate(recent.requests),
                prompt_tokens_per_s=rate(recent.prompt_tokens),
                generated_tokens_per_s=rate(services.metrics.tokens.recent),
            ),
            ttft_ms=Latency.of(recent.ttft, now_s),
            tpot_ms=Latency.of(recent.tpot, now_s),
            transfer=Transfer(
                bytes_per_s=rate(recent.transfer_bytes),
                p50_ms=moved.percentile_ms(0.5),
                p99_ms=moved.percentile_ms(0.99),
            ),
            cache_hit_rate=_hit_rate(recent, now_s),
            accepted_draft_length=recent.accepted_length(now_s),
            in_flight=services.requests.num_in_flight,
            queued=services.requests.num_queued,
        )


def _hit_rate(recent: LastMinute, now_s: float) -> float | None:
    prompt_tokens = recent.prompt_tokens.total(now_s)
    return recent.cached_tokens.total(now_s) / prompt_tokens if prompt_tokens else None


router = APIRouter()


@router.get("/stats")
async def stats(request: Request) -> StatsView:
    """Shows throughput, latencies and transfers of the last minute, as this router process saw them."""
    return StatsView.of(services_of(request))
