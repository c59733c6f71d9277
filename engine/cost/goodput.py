"""Requests per second that a prefill and a decode server can serve within an objective, and the best division
of servers into both kinds.

All values are closed formulas of step costs and lengths; ``benchmarks/scale/goodput.py`` simulates the same
load and compares the results. Each kind of server is computed alone: one server with its share of a Poisson
stream of requests. So a pool of servers serves the rate of one server times the number of servers.

* prefill: an M/G/1 queue, in which prompts are computed one after the other. The busier the server, the more
  prompts share a step; ``rho`` is the share of time in which the server is busy. P(wait > t) is assumed to be
  ``rho * exp(-rho * t / E[wait])`` with E[wait] from the formula of Pollaczek and Khinchine. The rate is the
  highest one at which the objective's share of prompts, with their various lengths, get their first token in
  time. The router picks the less loaded of two servers, so real waits are shorter than in this formula.
* decode: the mean number of rows in a step is the request rate times the time that a request stays. The
  number of rows is Poisson distributed, so ``rows + z * sqrt(rows)`` rows, with z the normal quantile of the
  objective's share, have to fit the limits of TPOT, rows and blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean

from engine.cost.step_cost import StepCosts

QUANTILES = 1024
LENGTH_SPREAD = 0.8
"""Spread that is assumed if only mean lengths are known: one prompt in ten is longer than twice the mean."""
_BISECTIONS = 50


@dataclass(frozen=True)
class Lengths:
    """Log-normal distribution of numbers of tokens. ``spread`` is the standard deviation of the logarithm; 0:
    all lengths are equal."""

    mean: float
    spread: float = 0.0
    maximum: int | None = None
    """Longer lengths are cut to this length; None: no limit."""

    def at(self, share: float) -> int:
        """Returns the length that ``share`` of all requests do not exceed; 0 < ``share`` < 1."""
        exponent = self.spread * NormalDist().inv_cdf(share) - self.spread**2 / 2
        length = max(1, round(self.mean * math.exp(exponent)))
        return length if self.maximum is None else min(length, self.maximum)

    @cached_property
    def sample(self) -> tuple[int, ...]:
        """Equally likely lengths that represent the distribution."""
        return tuple(self.at((i + 0.5) / QUANTILES) for i in range(QUANTILES))


@dataclass(frozen=True)
class Objective:
    """Limits for TTFT and TPOT. ``share`` of all requests have to meet both limits."""

    ttft_s: float
    tpot_s: float
    share: float = 0.9


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server: ``chunk_tokens`` of a prefill server, rows and blocks of a decode server."""

    chunk_tokens: int
    max_rows: int
    num_blocks: int | None
    """Blocks without the null block; None: the model keeps no KV and needs no blocks."""
    block_size: int

    def blocks_for(self, num_tokens: float) -> int:
        return math.ceil(num_tokens / self.block_size)


@dataclass(frozen=True)
class DecodeRate:
    requests_per_s: float
    rows: float
    """Mean number of rows in a step."""
    step_s: float
    bound: str
    """The limit that is reached first: ``TPOT``, ``rows`` or ``blocks``."""


@dataclass(frozen=True)
class Split:
    """A division of servers into prefill and decode servers, and the request rate that they can serve
    together."""

    num_prefill: int
    num_decode: int
    requests_per_s: float


@dataclass(frozen=True)
class ServerRates:
    """Requests per second that one server of each kind can serve."""

    prefill_per_s: float
    decode: DecodeRate

    def best_split(self, num_servers: int) -> Split:
        """Returns the division of ``num_servers``, 2 or more, that serves the most requests per second."""
        rates = self.prefill_per_s, self.decode.requests_per_s
        splits = [
            Split(p, num_servers - p, min(p * rates[0], (num_servers - p) * rates[1]))
            for p in range(1, num_servers)
        ]
        return max(splits, key=lambda split: split.requests_per_s)


def server_rates(
    costs: StepCosts, prompts: Lengths, answers: Lengths, objective: Objective, limits: ServerLimits
) -> ServerRates:
    """Returns the request rates that one server of each kind can serve within the objective."""
    decode = decode_rate(costs, prompts, answers, objective, limits)
    # A new row waits for the step under way, half a step on average, and is computed in the next step.
    return ServerRates(prefill_rate(costs, prompts, objective, limits, 1.5 * decode.step_s), decode)


def prefill_rate(
    costs: StepCosts, prompts: Lengths, objective: Objective, limits: ServerLimits, later_s: float = 0.0
) -> float:
    """Returns the requests per second of one prefill server; 0 if prompts alone take too long.

    ``later_s``: time from the last step of a prompt to its first token, without the time to read its KV.
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
        # rho = rate * (rho * shared + (1 - rho) * alone): a share rho of the prompts is in shared steps.
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
    """Returns the rate of one decode server; 0 requests per second if one row alone takes too long."""
    answer = fmean(answers.sample)
    stay = (
        fmean(n * n for n in answers.sample) / answer
    )  # mean length of the answers in a step; long answers count more, since they stay for more steps
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
    """Returns the probability of waiting longer than ``rest_s`` for a prefill server.

    ``busy`` is the share of the time in which the server is busy.
    """
    return 1.0 if rest_s < 0 else busy * math.exp(-busy * rest_s / mean_wait_s)


def mean_below(peak: float, share: float) -> float:
    """Returns the mean of a Poisson distributed number that exceeds ``peak`` in 1 - ``share`` of all cases.

    The normal distribution approximates the Poisson distribution.
    """
    z = max(0.0, NormalDist().inv_cdf(share))
    return (math.sqrt(z * z / 4 + peak) - z / 2) ** 2
