"""How many requests a second a prefill and a decode server take within an objective, and how many of each.

Closed formulas over step costs and lengths; ``benchmarks/scale/goodput.py`` simulates the same and compares.
Both kinds are looked at alone, a server with its share of a Poisson stream, so that pools differ by numbers
only:

* prefill: M/G/1, prompts one behind the other. Steps are shared with others the more the server is busy.
  P(wait > t) is taken to be ``rho * exp(-rho * t / E[wait])`` with E[wait] by Pollaczek and Khinchine. The
  rate is the highest at which the objective's share of prompts, each as long as it is, has its first token
  in time. The less loaded of two servers, which the router takes, does better than that.
* decode: rows in a step are as many as rate times stay, Poisson distributed, so that
  ``rows + z * sqrt(rows)`` of them, z being the objective's quantile, have to fit TPOT, rows and blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean

from engine.cost.step_cost import StepCosts

QUANTILES = 1024
LENGTH_SPREAD = 0.8
"""Assumed where only mean lengths are known: one prompt in ten is over twice the mean."""
_BISECTIONS = 50


@dataclass(frozen=True)
class Lengths:
    """Log-normal numbers of tokens; ``spread`` is the logarithm's standard deviation, 0: all are equal."""

    mean: float
    spread: float = 0.0
    maximum: int | None = None
    """Longer ones are cut to this."""

    def at(self, share: float) -> int:
        """The length that ``share`` of all do not exceed; 0 < ``share`` < 1."""
        exponent = self.spread * NormalDist().inv_cdf(share) - self.spread**2 / 2
        length = max(1, round(self.mean * math.exp(exponent)))
        return length if self.maximum is None else min(length, self.maximum)

    @cached_property
    def sample(self) -> tuple[int, ...]:
        """Equally likely lengths that stand for all."""
        return tuple(self.at((i + 0.5) / QUANTILES) for i in range(QUANTILES))


@dataclass(frozen=True)
class Objective:
    """A share of all requests has to meet both times."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9


@dataclass(frozen=True)
class ServerLimits:
    """Of both kinds of servers: chunks; of a decode server: rows and blocks."""

    chunk_tokens: int
    max_rows: int
    num_blocks: int | None
    """Without the null block; None: the model keeps no KV, and no block is needed."""
    block_size: int

    def blocks_for(self, num_tokens: float) -> int:
        return math.ceil(num_tokens / self.block_size)


@dataclass(frozen=True)
class DecodeRate:
    requests_per_s: float
    rows: float
    """In a step, on average."""
    step_s: float
    bound: str
    """What allows no more: ``TPOT``, ``rows`` or ``blocks``."""


@dataclass(frozen=True)
class Split:
    """Of a number of servers."""

    num_prefill: int
    num_decode: int
    requests_per_s: float


@dataclass(frozen=True)
class ServerRates:
    """Requests a second that one server of each kind takes."""

    prefill_per_s: float
    decode: DecodeRate

    def best_split(self, num_servers: int) -> Split:
        """The division of ``num_servers``, 2 or more, that takes the most requests."""
        rates = self.prefill_per_s, self.decode.requests_per_s
        splits = [
            Split(p, num_servers - p, min(p * rates[0], (num_servers - p) * rates[1]))
            for p in range(1, num_servers)
        ]
        return max(splits, key=lambda split: split.requests_per_s)


def server_rates(
    costs: StepCosts, prompts: Lengths, answers: Lengths, objective: Objective, limits: ServerLimits
) -> ServerRates:
    """What one server of each kind takes within the objective."""
    decode = decode_rate(costs, prompts, answers, objective, limits)
    # A row waits for the step that is under way, half of one on average, and is in the next.
    return ServerRates(prefill_rate(costs, prompts, objective, limits, 1.5 * decode.step_s), decode)


def prefill_rate(
    costs: StepCosts, prompts: Lengths, objective: Objective, limits: ServerLimits, later_s: float = 0.0
) -> float:
    """Requests a second of one prefill server; 0 where prompts alone take too long.

    ``later_s``: what passes between a prompt's end and its first token, without the reading of its KV.
    """
    chunk = limits.chunk_tokens
    alone = [costs.prefill.prompt_s(n, chunk) for n in prompts.sample]
    shared = [costs.prefill.share_s(n, chunk) for n in prompts.sample]
    rests = [
        objective.ttft_s - service - later_s - costs.handoff.seconds(n)
        for service, n in zip(alone, prompts.sample, strict=True)
    ]
    mean_alone, mean_shared = fmean(alone), fmean(shared)
    squares = [
        fmean(a * b for a, b in zip(*pair, strict=True))
        for pair in ((shared, shared), (shared, alone), (alone, alone))
    ]

    def is_met(rate: float) -> bool:
        # rho = rate * (rho * shared + (1 - rho) * alone): steps are as full as the server is busy.
        rho = rate * mean_alone / (1 + rate * (mean_alone - mean_shared))
        weights = rho * rho, 2 * rho * (1 - rho), (1 - rho) ** 2
        mean_square = sum(weight * square for weight, square in zip(weights, squares, strict=True))
        wait_s = rate * mean_square / (2 * (1 - rho))
        late = fmean(late_probability(rho, wait_s, rest) for rest in rests)
        return late <= 1 - objective.share

    low, high = 0.0, 1 / mean_shared
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low if low > 1e-6 / mean_shared else 0.0


def decode_rate(
    costs: StepCosts, prompts: Lengths, answers: Lengths, objective: Objective, limits: ServerLimits
) -> DecodeRate:
    """Requests a second of one decode server; 0 where one row alone takes too long."""
    answer = fmean(answers.sample)
    stay = (
        fmean(n * n for n in answers.sample) / answer
    )  # mean answer of those that are there: long ones stay
    prompt = fmean(prompts.sample)
    context = prompt + stay / 2

    def step_s(rows: int) -> float:
        return costs.decode.seconds(rows, rows * context)

    most = {"rows": limits.max_rows}
    if limits.num_blocks is not None:
        most["blocks"] = limits.num_blocks // limits.blocks_for(prompt + stay)
    bound = min(most, key=lambda name: most[name])
    peak = most[bound]
    if peak and step_s(peak) > objective.tpot_s:
        bound = "TPOT"
        low = 0
        while peak - low > 1:
            middle = (low + peak) // 2
            low, peak = (middle, peak) if step_s(middle) <= objective.tpot_s else (low, middle)
        peak = low
    if peak == 0:
        return DecodeRate(0.0, 0.0, step_s(1), bound)
    rows = max(0.5, mean_below(peak, objective.share))
    seconds = costs.decode.seconds(max(1, round(rows)), rows * context)
    return DecodeRate(rows / (answer * seconds), rows, seconds, bound)


def late_probability(busy: float, mean_wait_s: float, rest_s: float) -> float:
    """Of waiting longer than ``rest_s`` for a prefill server that is ``busy`` for that share of the time."""
    return 1.0 if rest_s < 0 else busy * math.exp(-busy * rest_s / mean_wait_s)


def mean_below(peak: float, share: float) -> float:
    """The mean of a Poisson number that exceeds ``peak`` in 1 - ``share`` of all cases, by the normal."""
    z = max(0.0, NormalDist().inv_cdf(share))
    return (math.sqrt(z * z / 4 + peak) - z / 2) ** 2
