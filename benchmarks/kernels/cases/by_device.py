"""The measured cases: every op on the path of a step, at the batches and contexts that a server sees."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.cases import attention as attention_cases
from benchmarks.kernels.cases import delta as delta_cases
from benchmarks.kernels.cases import dense as dense_cases
from benchmarks.kernels.cases import mamba as mamba_cases
from benchmarks.kernels.cases import sampling as sampling_cases
from benchmarks.kernels.cases.case import Case
from benchmarks.kernels.cases.models import Model, eight_b, small_models

DRAFTED = 4
"""Positions of a row with three drafts."""

CPU_DECODE = (
    (1, 256, 1),
    (8, 256, 1),
    (32, 256, 1),
    (8, 256, DRAFTED),
    (1, 4096, 1),
    (8, 4096, 1),
    (8, 4096, DRAFTED),
)
"""Rows, context and queries per row."""


def cpu_cases() -> Iterator[Case]:
    """Yields cases with both models of the serving benchmark; torch.compile runs on one shape of each op that
    it can fuse."""
    for model in small_models():
        for rows, positions in ((1, 1), (8, 1), (32, 1), (8, DRAFTED)):
            compiled = (rows, positions) == (8, 1)
            yield mamba_cases.state_update(model, rows, positions, compiled=compiled)
            yield mamba_cases.conv_update(model, rows, positions, compiled=compiled)
            yield delta_cases.state_update(model, rows, positions)
        for tokens in (256, 1024):
            yield mamba_cases.conv(model, tokens, compiled=tokens == 256)
            yield mamba_cases.scan(model, tokens)
            yield delta_cases.scan(model, tokens)
        for rows, seq_len, queries in CPU_DECODE:
            yield attention_cases.decode(model, rows, seq_len, queries)
        for tokens in (256, 1024):
            yield attention_cases.prefill(model, tokens)
        for tokens in (8, 256):
            yield attention_cases.store(model, tokens)
        for rows in (1, 8, 256):
            yield dense_cases.norm(model, rows, compiled=rows == 8)
            yield dense_cases.add_norm(model, rows, compiled=rows == 8)
            yield mamba_cases.gated_norm(model, rows, compiled=rows == 8)
            yield delta_cases.gated_norm(model, rows, compiled=rows == 8)
        for layer in ("in_proj", "up_proj", "lm_head"):
            for rows in (1, 8, 32):
                yield dense_cases.linear(model, layer, rows)
        for rows in (1, 8, 32, 256):
            yield dense_cases.quantized_linear(model, rows)
        yield dense_cases.linear(model, "in_proj", 256)
        yield dense_cases.linear(model, "up_proj", 256)
        for rows in (1, 8, 256):
            yield dense_cases.experts(model, rows)
        yield from _sampling(model, (1, 8, 32))


def gpu_cases() -> Iterator[Case]:
    """Yields cases with an 8 B model in bfloat16."""
    model = eight_b()
    for rows in (1, 8, 64):
        for positions in (1, DRAFTED):
            yield mamba_cases.state_update(model, rows, positions)
            yield mamba_cases.conv_update(model, rows, positions)
            yield delta_cases.state_update(model, rows, positions)
    for tokens in (2048, 8192):
        yield mamba_cases.conv(model, tokens)
        yield mamba_cases.scan(model, tokens)
        yield delta_cases.scan(model, tokens)
    for tokens in (8, 64, 8192):
        yield attention_cases.store(model, tokens)
    for rows in (1, 8, 64, 8192):
        yield dense_cases.norm(model, rows)
        yield dense_cases.add_norm(model, rows)
        yield mamba_cases.gated_norm(model, rows)
        yield delta_cases.gated_norm(model, rows)
    for layer in ("in_proj", "up_proj", "down_proj", "lm_head"):
        for rows in (1, 8, 64):
            yield dense_cases.linear(model, layer, rows)
    for rows in (1, 8, 64, 8192):
        yield dense_cases.quantized_linear(model, rows)
    yield dense_cases.linear(model, "in_proj", 8192)
    yield dense_cases.linear(model, "up_proj", 8192)
    for rows in (1, 8, 64, 8192):
        yield dense_cases.experts(model, rows)
    yield from _sampling(model, (1, 8, 64))
    # Last: FlashInfer compiles its kernels for minutes, and what is measured by then is written.
    for seq_len in (1024, 16384):
        for rows in (1, 8, 64):
            for queries in (1, DRAFTED):
                yield attention_cases.decode(model, rows, seq_len, queries)
    for tokens in (2048, 8192):
        yield attention_cases.prefill(model, tokens)


def _sampling(model: Model, batches: tuple[int, ...]) -> Iterator[Case]:
    for kind in sampling_cases.KINDS:
        for rows in batches:
            yield sampling_cases.sample(model, kind, rows, 1)
    yield sampling_cases.sample(model, "greedy", batches[1], DRAFTED)
    for rows in batches:
        yield sampling_cases.accept(model, rows, DRAFTED)
