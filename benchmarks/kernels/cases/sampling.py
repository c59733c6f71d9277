"""From logits to the next step's tokens."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch

from benchmarks.kernels.cases import eager, work
from benchmarks.kernels.cases.case import Call, Case, case_name, random
from benchmarks.kernels.cases.models import Model
from engine.request import Request
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_table import SamplingTable
from kernels.speculation.accept_drafts import AcceptDrafts
from wire.messages.sampling_params import SamplingParams

STOP_IDS = 8
KINDS = {
    "greedy": SamplingParams(max_tokens=9, temperature=0),
    "random": SamplingParams(max_tokens=9, temperature=0.8),
    "top-p": SamplingParams(max_tokens=9, temperature=1.0, top_p=0.95),
    "top-k, top-p": SamplingParams(max_tokens=9, temperature=0.8, top_k=50, top_p=0.9),
}


def sample(model: Model, kind: str, rows: int, positions: int) -> Case:
    """All of :meth:`engine.sampling.sampler.Sampler.sample` for rows that ask for the same ``kind``."""
    params = KINDS[kind]

    def operands(device: torch.device) -> SimpleNamespace:
        table = SamplingTable(rows, model.config.vocab_size, device, STOP_IDS)
        requests = [Request(str(row), [1], params, seed=row) for row in range(rows)]
        for row, request in enumerate(requests):
            request.row = row
            table.fill(request)
        return SimpleNamespace(
            logits=random(device, torch.float32, rows, positions, model.config.vocab_size) * 2,
            table=table,
            needs=table.needs(requests),
            rows=torch.arange(rows, device=device),
            positions=torch.arange(positions, device=device).expand(rows, -1).contiguous(),
            input_ids=torch.ones(rows, positions, dtype=torch.int64, device=device),
        )

    def ours(o: SimpleNamespace) -> Call:
        sampler = Sampler(o.table)
        return lambda: sampler.sample(o.logits, o.rows, o.positions, o.input_ids, o.needs)

    def torch_eager(o: SimpleNamespace) -> Call:
        logits = o.logits.flatten(0, 1)
        temperature, top_p = (
            torch.full((len(logits),), value, device=logits.device)
            for value in (params.temperature, params.top_p)
        )
        top_k = torch.full((len(logits),), params.top_k or logits.shape[1], device=logits.device)
        choose: Call = functools.partial(eager.sample, logits, temperature, top_k, top_p)
        if kind == "greedy":
            choose = functools.partial(logits.argmax, dim=-1)
        elif kind == "random":
            choose = functools.partial(eager.sample_any, logits, temperature)
        return lambda: (choose(), logits.isfinite().all(dim=-1))

    return Case(
        f"sample, {kind}",
        case_name(model, rows=rows, positions=positions),
        work.sampling(rows, positions, model.config.vocab_size, greedy=kind == "greedy"),
        model.weight_bytes,
        operands,
        ours,
        {"eager": torch_eager},
        comparable=False,
    )


def accept(model: Model, rows: int, positions: int) -> Case:
    """Every row has random drafts, so hardly any is right. Rows stay active however often it runs."""

    def operands(device: torch.device) -> SimpleNamespace:
        def table(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((rows + 1, *shape), value, dtype=dtype, device=device)

        def column(*shape: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        return SimpleNamespace(
            op=AcceptDrafts(
                rows=torch.arange(rows, device=device),
                write_slots=column(positions, value=1),
                forced=column(value=-1, dtype=torch.int64),
                tokens=torch.randint(model.config.vocab_size, (rows + 1, positions), device=device),
                num_drafts=table(value=positions - 1),
                num_computed=table(),
                state_slot=table(),
                active=table(value=1, dtype=torch.int32),
                limit=table(value=2**31 - 1),
                max_drafts=table(value=positions - 1),
                stop_ids=table(STOP_IDS, value=-1, dtype=torch.int64),
                accepted=column(),
                results=column(positions + 3, dtype=torch.int64),
            ),
            sampled=torch.randint(model.config.vocab_size, (rows, positions), device=device),
            is_finite=column(positions, value=1, dtype=torch.bool),
        )

    return Case(
        "accept_drafts",
        case_name(model, rows=rows, positions=positions),
        work.accept_drafts(rows, positions, STOP_IDS),
        model.weight_bytes,
        operands,
        lambda o: lambda: o.op(rows, sampled=o.sampled, is_finite=o.is_finite),
    )
