"""The part of ``twinfang plan`` about time: step costs, requests per second, prefill : decode."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.cost.goodput import (
    LENGTH_SPREAD,
    Lengths,
    Objective,
    ServerLimits,
    ServerRates,
    Split,
    server_rates,
)
from engine.cost.gpu import GpuSpeed, gpu_costs
from engine.cost.step_cost import StepCosts
from wire.errors import ConfigError

Row = tuple[str, str, str]


@dataclass(frozen=True)
class SpeedQuestion:
    """The load of the servers, and the speed of their GPUs."""

    gpu: GpuSpeed
    prompt_tokens: int
    answer_tokens: int
    objective: Objective
    num_servers: int

    @classmethod
    def from_flags(cls, values: argparse.Namespace) -> SpeedQuestion | None:
        """Returns None if neither GPU rate is given. Raises :class:`ConfigError` if a flag is missing."""
        if values.gpu_tflops is None and values.gpu_bandwidth is None:
            return None
        given = {
            "--gpu-memory": values.gpu_memory,
            "--gpu-tflops": values.gpu_tflops,
            "--gpu-bandwidth": values.gpu_bandwidth,
        }
        missing = [flag for flag, value in given.items() if value is None]
        if missing:
            raise ConfigError(
                f"{' and '.join(given)} go together; {' and '.join(missing)} is missing: give it too"
            )
        gpu = GpuSpeed(values.gpu_tflops * 1e12, values.gpu_bandwidth * 1e9, values.link_bandwidth * 1e9)
        objective = Objective(values.ttft, values.tpot)
        return cls(gpu, values.prompt_tokens, values.answer_tokens, objective, values.servers)

    def answer(self, config: EngineConfig, model: ModelConfig, cache_budget: int) -> SpeedPlan:
        """Computes the plan for prefill and decode servers of this configuration. Each server has
        ``cache_budget`` bytes for its two pools together.

        Raises :class:`ConfigError` if prompt and answer exceed the context, and :class:`CapacityError` if a
        decode server does not fit.
        """
        tp = config.planned_rank()
        demand = replace(config, role="decode").demand(model, tp, device_type="cuda")
        if self.prompt_tokens + self.answer_tokens > demand.max_model_len:
            raise ConfigError(
                f"--prompt-tokens {self.prompt_tokens} and --answer-tokens {self.answer_tokens} exceed the "
                f"context of {demand.max_model_len} tokens; lower them or raise --max-model-len"
            )
        plan = demand.within(cache_budget)
        limits = ServerLimits(
            config.max_batch_tokens,
            demand.max_num_seqs,
            plan.num_blocks - 1 if plan.has_kv else None,
            plan.block_size,
        )
        prompts = Lengths(self.prompt_tokens, LENGTH_SPREAD, demand.max_model_len - self.answer_tokens)
        answers = Lengths(self.answer_tokens, LENGTH_SPREAD, demand.max_model_len - self.prompt_tokens)
        costs = gpu_costs(config.with_caches(model), self.gpu, tp)
        rates = server_rates(costs, prompts, answers, self.objective, limits)
        return SpeedPlan(self, costs, rates, rates.best_split(self.num_servers), limits)


@dataclass(frozen=True)
class SpeedPlan:
    question: SpeedQuestion
    costs: StepCosts
    rates: ServerRates
    split: Split
    limits: ServerLimits

    def rows(self) -> Iterator[Row]:
        """Yields name, explanation, value."""
        asked, decode, split = self.question, self.rates.decode, self.split
        ttft, tpot = _time(asked.objective.ttft_s), _time(asked.objective.tpot_s)
        share = f"{asked.objective.share:.0%}"
        yield "prompt", f"{asked.prompt_tokens} tokens, alone", _time(self._prompt_s())
        yield "handoff", "its state and KV, messages", _time(self.costs.handoff.seconds(asked.prompt_tokens))
        for num_rows in (1, self.limits.max_rows):
            yield "decode step", self._rows_text(num_rows), _time(self._step_s(num_rows))
        yield "a prefill server", f"TTFT up to {ttft} for {share}", _rate(self.rates.prefill_per_s)
        how = f"TPOT up to {tpot} for {share}; {decode.rows:.0f} rows, bound by {decode.bound}"
        yield "a decode server", how, _rate(decode.requests_per_s)
        of = f"prefill : decode = {split.num_prefill} : {split.num_decode}"
        yield f"{asked.num_servers} servers", of, _rate(split.requests_per_s)

    def figures(self) -> dict[str, object]:
        """Returns the same values for JSON, with times in seconds."""
        asked = self.question
        return {
            "source": "computed from the GPU's rates, not measured",
            "prompt_tokens": asked.prompt_tokens,
            "answer_tokens": asked.answer_tokens,
            "length_spread": LENGTH_SPREAD,
            "objective": asdict(asked.objective),
            "costs": asdict(self.costs),
            "prompt_s": self._prompt_s(),
            "handoff_s": self.costs.handoff.seconds(asked.prompt_tokens),
            "prefill_server_requests_per_s": self.rates.prefill_per_s,
            "decode_server": asdict(self.rates.decode),
            "best_split": asdict(self.split),
        }

    def _prompt_s(self) -> float:
        return self.costs.prefill.prompt_s(self.question.prompt_tokens, self.limits.chunk_tokens)

    def _step_s(self, num_rows: int) -> float:
        context = self.question.prompt_tokens + self.question.answer_tokens // 2
        return self.costs.decode.seconds(num_rows, num_rows * context)

    def _rows_text(self, num_rows: int) -> str:
        context = self.question.prompt_tokens + self.question.answer_tokens // 2
        return f"{num_rows} row{'s' * (num_rows > 1)} at {context} tokens, no drafts"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}/s" if per_s < 100 else f"{per_s:.0f}/s"
