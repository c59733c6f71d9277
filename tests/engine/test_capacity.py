"""A budget becomes pool sizes, or a refusal that shows its arithmetic."""

import pytest
import torch

from engine.caches import CacheSpec
from engine.capacity import plan_capacity
from wire.errors import CapacityError

SPEC = CacheSpec(
    attn_layers=2,
    kv_heads=2,
    head_dim=16,
    kv_dtype=torch.float32,
    mamba_layers=3,
    conv_channels=96,
    conv_width=4,
    mamba_heads=4,
    mamba_head_dim=16,
    state_size=8,
    conv_dtype=torch.float32,
    ssm_dtype=torch.float32,
)


def plan(budget_bytes, role="decode", max_num_seqs=8, max_model_len=256):
    return plan_capacity(
        SPEC,
        role=role,
        budget_bytes=budget_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        block_size=16,
    )


def test_slots_are_counted_first_and_blocks_get_the_rest():
    made = plan(1 << 20)
    assert made.num_slots == 9
    assert made.num_blocks == ((1 << 20) - 9 * SPEC.slot_bytes) // SPEC.block_bytes(16)
    assert made.num_bytes <= 1 << 20


def test_a_prefill_server_has_slots_for_running_and_for_leased_states():
    assert plan(1 << 24, role="prefill").num_slots == 1 + 2 * 8


def test_no_more_blocks_than_all_sequences_at_full_length_can_use():
    assert plan(1 << 34).num_blocks == 1 + 8 * 16


def test_too_small_a_budget_is_refused_with_the_arithmetic_and_the_remedy():
    with pytest.raises(CapacityError) as refusal:
        plan(100_000)
    message = refusal.value.message
    assert "9 state slots (1 null + 8 sequences x 1 + 0 cached)" in message
    assert "17 KV blocks (1 null + one sequence of 256 tokens at 16 a block)" in message
    assert "raise --cache-memory, or lower --max-num-seqs or --max-model-len" in message


def test_the_smallest_budget_that_fits_is_accepted_and_one_byte_less_is_not():
    smallest = 9 * SPEC.slot_bytes + 17 * SPEC.block_bytes(16)
    assert plan(smallest).num_blocks == 17
    with pytest.raises(CapacityError):
        plan(smallest - 1)
