"""The model's logits compared with transformers', for many ways to cut a sequence into steps."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.weights import WeightFiles
from engine.models import load_model
from engine.models.layers.expert_weights import NEMOTRON_EXPERTS, load_experts
from engine.models.layers.moe import GroupedExperts, LoopedExperts, StackedExperts
from engine.parallel.tensor_parallel import ALONE
from testing.checkpoints.loading_lines import loading_lines
from testing.checkpoints.random_checkpoint import (
    DENSE,
    LATENT_MOE,
    WITH_MOE,
    CheckpointShape,
    make_checkpoint,
    transformers_logits,
)
from testing.engines.sequences import Driver, Sequence, random_sequences

TOLERANCE = 1e-4
"""Largest difference of two logits, relative to the largest logit."""

SHAPES = {
    "dense": DENSE,
    "moe": WITH_MOE,
    "latent moe in groups": LATENT_MOE,
    "moe without normalisation": replace(WITH_MOE, norm_topk_prob=False, num_experts_per_tok=1),
    "one group, small heads": replace(DENSE, n_groups=1, mamba_head_dim=8, head_dim=8, chunk_size=8),
    "eight groups, wide state": replace(DENSE, n_groups=8, ssm_state_size=32, chunk_size=64),
    "one kv head": replace(DENSE, num_key_value_heads=1, head_dim=32, mamba_num_heads=4, n_groups=4),
    "as many kv heads": replace(DENSE, num_key_value_heads=4, mamba_head_dim=32, vocab_size=301),
    "biases": replace(WITH_MOE, use_bias=True, mlp_bias=True, moe_latent_size=24),
    "narrow conv without bias": replace(DENSE, conv_kernel=2, use_conv_bias=False),
    "least dt": replace(DENSE, dt_min=0.1),
    "two layers": replace(DENSE, pattern="*M"),
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=1)


@pytest.fixture(scope="module")
def dense_checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("dense"), DENSE)


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("moe"), LATENT_MOE)


def assert_as_transformers(model_dir, sequence: Sequence, logits: torch.Tensor) -> None:
    expected = transformers_logits(model_dir, sequence.token_ids)
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"relative difference {error:.2e}"


def test_ragged_prompts_in_one_prefill(checkpoint):
    model = load_model(checkpoint)
    sequences = random_sequences(model.config.vocab_size, [1, 37, 2, 64, 17])
    logits = Driver(model, 5).step([(seq, len(seq.token_ids)) for seq in sequences])
    for seq, rows in zip(sequences, logits, strict=True):
        assert_as_transformers(checkpoint, seq, rows)


def test_token_by_token(checkpoint):
    model = load_model(checkpoint)
    sequences = random_sequences(model.config.vocab_size, [40, 40, 40])
    driver = Driver(model, 3)
    steps = [driver.step([(seq, 1) for seq in sequences]) for _ in range(40)]
    for index, seq in enumerate(sequences):
        assert_as_transformers(checkpoint, seq, torch.cat([step[index] for step in steps]))


@pytest.mark.parametrize("seed", range(3))
def test_random_pieces_of_several_rows_in_mixed_batches(checkpoint, seed):
    """Chunks of one token become decode rows, in the same step as other sequences' chunks; rows come and
    go."""
    rng = random.Random(seed)
    model = load_model(checkpoint)
    sequences = random_sequences(model.config.vocab_size, [rng.randint(20, 90) for _ in range(4)], seed)
    outputs = Driver(model, 4).run_in_random_pieces(sequences, rng)
    for seq, rows in zip(sequences, outputs, strict=True):
        assert_as_transformers(checkpoint, seq, rows)


@pytest.mark.parametrize("shape", ["dense_checkpoint", "moe_checkpoint"])
def test_rejected_positions_leave_no_trace(shape, request):
    """Three positions a row; the next step starts from the slot of the last accepted one."""
    model_dir = request.getfixturevalue(shape)
    model = load_model(model_dir)
    sequences = random_sequences(model.config.vocab_size, [50, 44, 61])
    driver = Driver(model, 3)
    collected = [[rows] for rows in driver.step([(seq, 20) for seq in sequences])]
    rng = random.Random(0)
    while all(seq.num_computed + 3 <= len(seq.token_ids) for seq in sequences):
        accepted = [rng.randint(1, 3) for _ in sequences]
        drafts = [list(seq.token_ids) for seq in sequences]
        for seq, count in zip(sequences, accepted, strict=True):  # what is rejected was a wrong token
            for at in range(seq.num_computed + count, seq.num_computed + 3):
                seq.token_ids[at] = (seq.token_ids[at] + 1) % model.config.vocab_size
        logits = driver.step_speculative(sequences, 3)
        for index, (seq, count) in enumerate(zip(sequences, accepted, strict=True)):
            seq.token_ids = drafts[index]
            seq.slot = seq.slots[count - 1]
            seq.num_computed += count
            collected[index].append(logits[index][:count])
    for seq, rows in zip(sequences, collected, strict=True):
        seq.token_ids = seq.token_ids[: seq.num_computed]
        assert_as_transformers(model_dir, seq, torch.cat(rows))


def test_padding_rows_change_no_row_and_write_nothing(moe_checkpoint):
    model = load_model(moe_checkpoint)
    results = []
    for num_padding_rows in (0, 3):
        driver = Driver(model, 2)
        sequences = random_sequences(model.config.vocab_size, [30, 30])
        driver.step([(seq, 29) for seq in sequences])
        before = driver.caches.state[0].clone()
        results.append(driver.step([(seq, 1) for seq in sequences], num_padding_rows=num_padding_rows))
        assert torch.equal(driver.caches.state[0], before)
        assert torch.isnan(driver.caches.kv[0]).all()
    for alone, padded in zip(*results, strict=True):
        assert (alone - padded).abs().max() <= 1e-5 * alone.abs().max()


@pytest.mark.parametrize("shape", [DENSE, LATENT_MOE], ids=["dense", "moe"])
def test_names_and_sharding_of_the_checkpoint_change_nothing(shape, tmp_path):
    """Published names, transformers' names with stacked experts, one file or many.

    Not bit by bit: where a mapped tensor starts decides how a GEMM is cut.
    """
    results = []
    for index, (published, shard_size) in enumerate(
        [(True, "5GB"), (False, "5GB"), (True, "60KB"), (False, "60KB")]
    ):
        path = make_checkpoint(
            tmp_path / str(index), shape, published_names=published, max_shard_size=shard_size
        )
        assert (path / "model.safetensors").exists() == (shard_size == "5GB")
        model = load_model(path)
        sequence = random_sequences(model.config.vocab_size, [33])[0]
        results.append(Driver(model, 1).step([(sequence, 33)])[0])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_stacked_and_grouped_experts_equal_looped_experts(moe_checkpoint):
    """The GPU's grouped GEMMs, run on CPU, and the CPU's grouped product, against the loop."""
    model = load_model(moe_checkpoint)
    config = model.config.moe
    prefix = "backbone.layers.1.mixer."
    weights = WeightFiles(moe_checkpoint)
    up, down = load_experts(config, config.latent_size, weights, prefix, ALONE, NEMOTRON_EXPERTS)
    kinds = LoopedExperts, StackedExperts, GroupedExperts
    looped, *others = (kind(up, down, config.activation) for kind in kinds)
    moe = model.layers.blocks[1].mixers[0]
    for num_tokens in (1, 2, 50):
        x = torch.randn(num_tokens, model.config.hidden_size)
        ids, expert_weights = moe.route(x)
        latent = moe.enter_latent(x)
        expected = looped.forward(latent, ids, expert_weights)
        for experts in others:
            torch.testing.assert_close(experts.forward(latent, ids, expert_weights), expected)


def test_bfloat16_stays_near_float32(tmp_path):
    path = make_checkpoint(tmp_path, DENSE, dtype=torch.bfloat16)
    exact, rounded = load_model(path), load_model(path, dtype="bfloat16")
    assert rounded.embeddings.dtype == torch.bfloat16
    assert rounded.config.cache_spec().ssm_dtype == torch.float32
    results = []
    for model in (exact, rounded):
        driver = Driver(model, 1)
        sequence = random_sequences(model.config.vocab_size, [40])[0]
        results.append(torch.cat([driver.step([(sequence, n)])[0] for n in (20, 1, 1, 18)]))
    assert results[1].dtype == torch.float32
    assert (results[0] - results[1]).abs().max() < 0.1 * results[0].abs().max()


def test_residual_in_fp32_loses_less(tmp_path):
    """A bfloat16 model of 24 layers: most rounding happens in the sum over layers."""
    errors = []
    for residual_in_fp32 in (False, True):
        shape = CheckpointShape(pattern="M-M-*-" * 4, extra_config={"residual_in_fp32": residual_in_fp32})
        path = make_checkpoint(tmp_path / str(residual_in_fp32), shape, dtype=torch.bfloat16)
        sequence = random_sequences(shape.vocab_size, [64])[0]
        logits = Driver(load_model(path, dtype="bfloat16"), 1).step([(sequence, 64)])[0]
        errors.append((logits - transformers_logits(path, sequence.token_ids)).pow(2).mean().sqrt())
    assert errors[1] < errors[0]


def test_tied_embeddings_need_no_lm_head(tmp_path):
    path = make_checkpoint(tmp_path, replace(DENSE, extra_config={"tie_word_embeddings": True}))
    tensors = load_file(path / "model.safetensors")
    stored = load_model(path)
    identity = torch.eye(DENSE.hidden_size)
    assert torch.equal(stored.lm_head(identity).T, tensors.pop("lm_head.weight"))
    save_file(tensors, path / "model.safetensors")
    tied = load_model(path)
    assert torch.equal(tied.lm_head(identity).T, tied.embeddings)


def test_mtp_tensors_are_left_alone_and_strangers_are_logged(tmp_path, caplog):
    path = make_checkpoint(tmp_path, DENSE)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.enorm.weight": torch.ones(64)}, path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        load_model(path)
    assert loading_lines(caplog) == []
    save_file(tensors | {"visual.weight": torch.ones(64)}, path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        load_model(path)
    assert "visual.weight" in caplog.text
