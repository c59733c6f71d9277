"""Figures of the last minute as the admin API shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from router.admin.views.missing import MissingProcess
from router.observe.window import WINDOW_S, Distribution
from router.serving.services import Services


class Counts(BaseModel):
    """What one process counted in the last minute. Counts of several processes can be added."""

    covered_s: float
    """The seconds in which it was counted: fewer than a minute after a start."""
    requests: float
    prompt_tokens: float
    generated_tokens: float
    cached_tokens: float
    transfer_bytes: float
    tokens_with_drafts: float
    accepted_tokens: float
    ttft: dict[int, int]
    """How many times fell into each bucket of :data:`router.observe.window.BOUNDS_MS`."""
    tpot: dict[int, int]
    transfer: dict[int, int]
    in_flight: int
    queued: int

    @classmethod
    def of(cls, services: Services) -> Counts:
        recent = services.recent
        now_s = recent.now_s
        return cls(
            covered_s=recent.covered_s(now_s),
            requests=recent.requests.total(now_s),
            prompt_tokens=recent.prompt_tokens.total(now_s),
            generated_tokens=services.metrics.tokens.recent.total(now_s),
            cached_tokens=recent.cached_tokens.total(now_s),
            transfer_bytes=recent.transfer_bytes.total(now_s),
            tokens_with_drafts=recent.tokens_with_drafts.total(now_s),
            accepted_tokens=recent.accepted_tokens.total(now_s),
            ttft=recent.ttft.snapshot(now_s).counts,
            tpot=recent.tpot.snapshot(now_s).counts,
            transfer=recent.transfer.snapshot(now_s).counts,
            in_flight=services.requests.num_in_flight,
            queued=services.requests.num_queued,
        )


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
    def of(cls, found: Distribution) -> Latency:
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
    missing: list[MissingProcess]
    """Router processes that did not answer: what they counted is not in these values."""

    @classmethod
    def of(cls, counts: Sequence[Counts], missing: list[MissingProcess]) -> StatsView:
        """Add up the counts of all processes. Percentiles come from the sums of the histograms."""
        moved = Distribution.sum(one.transfer for one in counts)
        return cls(
            at=round(time.time(), 3),
            window_s=WINDOW_S,
            throughput=Throughput(
                requests_per_s=_rate((one.requests, one.covered_s) for one in counts),
                prompt_tokens_per_s=_rate((one.prompt_tokens, one.covered_s) for one in counts),
                generated_tokens_per_s=_rate((one.generated_tokens, one.covered_s) for one in counts),
            ),
            ttft_ms=Latency.of(Distribution.sum(one.ttft for one in counts)),
            tpot_ms=Latency.of(Distribution.sum(one.tpot for one in counts)),
            transfer=Transfer(
                bytes_per_s=_rate((one.transfer_bytes, one.covered_s) for one in counts),
                p50_ms=moved.percentile_ms(0.5),
                p99_ms=moved.percentile_ms(0.99),
            ),
            cache_hit_rate=_hit_rate(counts),
            accepted_draft_length=_accepted_length(counts),
            in_flight=sum(one.in_flight for one in counts),
            queued=sum(one.queued for one in counts),
            missing=missing,
        )


def _rate(totals: Iterable[tuple[float, float]]) -> float:
    """Add up the rates of processes, each given as a total and the seconds that it covers."""
    return round(sum(total / covered_s for total, covered_s in totals), 3)


def _hit_rate(counts: Sequence[Counts]) -> float | None:
    prompt_tokens = sum(one.prompt_tokens for one in counts)
    return sum(one.cached_tokens for one in counts) / prompt_tokens if prompt_tokens else None


def _accepted_length(counts: Sequence[Counts]) -> float | None:
    tokens = sum(one.tokens_with_drafts for one in counts)
    steps = tokens - sum(one.accepted_tokens for one in counts)
    return tokens / steps if steps > 0 else None
