"""A step's least bytes and FLOP, by configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.steps.step_bytes import decode_bytes, prefill_flops
from engine.checkpoint.model_config import ModelConfig
from engine.cost.step_cost import pairs_of
from engine.cost.step_size import StepSize
from engine.cost.weight_size import weight_bytes
from engine.models import read_config
from twinfang.flags.table import BUNDLED_MODEL


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return read_config(BUNDLED_MODEL)


def test_a_step_reads_all_weights_but_the_embedding_once(model):
    untied = replace(model, tie_word_embeddings=False)
    table = model.vocab_size * model.hidden_size * model.dtype.itemsize
    one, many = (decode_bytes(StepSize.of(untied), rows, 0) for rows in (1, 64))
    assert one.weights == many.weights == weight_bytes(untied) - table
    tied = StepSize.of(replace(model, tie_word_embeddings=True))
    assert decode_bytes(tied, 1, 0).weights == one.weights  # the table is the head


def test_drafts_write_a_state_each_and_read_the_context_once(model):
    size, spec = StepSize.of(model), model.cache_spec()
    plain, drafted = decode_bytes(size, 8, 8000), decode_bytes(size, 8, 8000, 4)
    assert plain.states == 8 * 2 * spec.slot_bytes
    assert drafted.states == 8 * 5 * spec.slot_bytes
    assert plain.kv == 8008 * spec.block_bytes(1)
    assert drafted.kv == 8032 * spec.block_bytes(1)
    assert drafted.logits == 4 * plain.logits
    assert drafted.total == drafted.weights + drafted.states + drafted.kv + drafted.logits


def test_a_prompt_in_chunks_has_the_flops_of_the_whole(model):
    size = StepSize.of(model)
    whole = prefill_flops(size, 300, pairs_of(0, 300), 1)
    chunks = prefill_flops(size, 128, pairs_of(0, 128)) + prefill_flops(size, 172, pairs_of(128, 172), 1)
    assert whole == pytest.approx(chunks)
    assert whole > 2 * 300 * size.num_used
