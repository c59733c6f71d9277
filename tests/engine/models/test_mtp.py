"""The MTP layer compared with its formula in plain torch, for many ways to cut a sequence into steps."""

from __future__ import annotations

import inspect
import json
import logging
import random
import textwrap
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.models import load_model
from testing.checkpoints.loading_lines import loading_lines
from testing.checkpoints.random_checkpoint import DENSE, DENSE_WITH_MTP, MOE_WITH_MTP, make_checkpoint
from testing.engines.layer_driver import MtpDriver
from testing.engines.mtp_oracle import MtpOracle
from testing.engines.sequences import Driver, Sequence, random_sequences
from wire.errors import ModelLoadError

TOLERANCE = 1e-4
"""Largest difference of two hidden states, relative to the largest."""

SHAPES = {
    "dense": DENSE_WITH_MTP,
    "moe": MOE_WITH_MTP,
    "two attention sublayers": replace(MOE_WITH_MTP, mtp_pattern="*-*E"),
    "mlp first": replace(DENSE_WITH_MTP, mtp_pattern="-*"),
    "no attention": replace(DENSE_WITH_MTP, mtp_pattern="-"),
    "attention alone": replace(DENSE_WITH_MTP, mtp_pattern="*"),
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=1)


@pytest.fixture(scope="module")
def dense_checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("dense"), DENSE_WITH_MTP)


def assert_close(outputs: Tensor, expected: Tensor) -> None:
    error = (outputs - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"relative difference {error:.2e}"


def assert_as_oracle(oracle: MtpOracle, sequence: Sequence, outputs: Tensor) -> None:
    """All positions but a sequence's last, whose next token nobody knows."""
    assert_close(outputs[: len(sequence.token_ids) - 1], oracle.outputs(sequence.token_ids))


def test_ragged_prompts_in_one_prefill(checkpoint):
    model = load_model(checkpoint, mtp=True)
    sequences = random_sequences(model.config.vocab_size, [2, 37, 3, 64, 17])
    outputs = MtpDriver(model, 5).step([(seq, len(seq.token_ids)) for seq in sequences])
    for seq, rows in zip(sequences, outputs, strict=True):
        assert_as_oracle(MtpOracle(checkpoint), seq, rows)


@pytest.mark.parametrize("seed", range(3))
def test_random_pieces_of_several_rows_in_mixed_batches(checkpoint, seed):
    rng = random.Random(seed)
    model = load_model(checkpoint, mtp=True)
    sequences = random_sequences(model.config.vocab_size, [rng.randint(20, 90) for _ in range(4)], seed)
    outputs = MtpDriver(model, 4).run_in_random_pieces(sequences, rng)
    for seq, rows in zip(sequences, outputs, strict=True):
        assert_as_oracle(MtpOracle(checkpoint), seq, rows)


def test_rejected_positions_leave_no_trace(checkpoint):
    """Three positions a row, wrong tokens where they are rejected: the next step writes their KV anew."""
    model = load_model(checkpoint, mtp=True)
    sequences = random_sequences(model.config.vocab_size, [50, 44, 61])
    driver = MtpDriver(model, 3)
    collected = [[rows] for rows in driver.step([(seq, 20) for seq in sequences])]
    rng = random.Random(0)
    while all(seq.num_computed + 3 <= len(seq.token_ids) for seq in sequences):
        accepted = [rng.randint(1, 3) for _ in sequences]
        true_ids = [list(seq.token_ids) for seq in sequences]
        for seq, count in zip(sequences, accepted, strict=True):
            # Token num_computed + count, the bonus, stays right: the MTP layer takes it.
            for at in range(seq.num_computed + count + 1, min(seq.num_computed + 3, len(seq.token_ids))):
                seq.token_ids[at] = (seq.token_ids[at] + 1) % model.config.vocab_size
        outputs = driver.step_speculative(sequences, 3)
        for index, (seq, count) in enumerate(zip(sequences, accepted, strict=True)):
            seq.token_ids = true_ids[index]
            seq.slot = seq.slots[count - 1]
            seq.num_computed += count
            collected[index].append(outputs[index][:count])
    for seq, rows in zip(sequences, collected, strict=True):
        expected = MtpOracle(checkpoint).outputs(seq.token_ids)
        computed = min(seq.num_computed, len(expected))
        assert_close(torch.cat(rows)[:computed], expected[:computed])


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_looped_drafts(checkpoint, num_drafts):
    """Drafts after every few tokens; what the loop wrote on guessed states is written anew."""
    model, oracle = load_model(checkpoint, mtp=True), MtpOracle(checkpoint)
    sequences = random_sequences(model.config.vocab_size, [40, 33])
    driver = MtpDriver(model, 2)
    for num_tokens in (13, 1, 1, 6, 1):
        outputs = driver.step([(seq, num_tokens) for seq in sequences])
        newest = torch.stack([rows[-1] for rows in outputs])
        drafts, looped = driver.loop(sequences, newest, num_drafts)
        for index, seq in enumerate(sequences):
            expected, expected_outputs = oracle.drafts(seq.token_ids[: seq.num_computed + 1], num_drafts)
            assert drafts[index].tolist() == expected
            assert_close(looped[index], expected_outputs)


def test_target_and_mtp_layer_leave_each_others_kv_alone(dense_checkpoint):
    """The target's layers come first in the pool, and its logits are those of a pool without MTP."""
    plain, with_mtp = load_model(dense_checkpoint), load_model(dense_checkpoint, mtp=True)
    assert plain.mtp is None
    (sequence,) = random_sequences(plain.config.vocab_size, [40])
    expected = Driver(plain, 1)
    expected_logits = expected.step([(sequence, 30)])[0]
    sequence.num_computed = 0
    driver = Driver(with_mtp, 1)
    assert torch.equal(driver.step([(sequence, 30)])[0], expected_logits)
    num_target = plain.config.cache_spec().attn_layers
    assert driver.caches.kv.shape[2] == num_target + 1
    assert torch.isnan(driver.caches.kv[:, :, num_target:]).all()
    sequence.num_computed = 0
    both = MtpDriver(with_mtp, 1)
    both.step([(sequence, 30)])
    assert not torch.isnan(both.caches.kv[sequence.blocks[:3], :, num_target:]).any()
    target_kv = (both.caches.kv[:, :, :num_target], expected.caches.kv)
    assert torch.equal(*(kv.nan_to_num() for kv in target_kv))


def test_padding_rows_change_no_row_and_write_nothing(dense_checkpoint):
    model = load_model(dense_checkpoint, mtp=True)
    results = []
    for num_padding_rows in (0, 3):
        driver = MtpDriver(model, 2)
        sequences = random_sequences(model.config.vocab_size, [30, 30])
        driver.step([(seq, 28) for seq in sequences])
        results.append(driver.step([(seq, 1) for seq in sequences], num_padding_rows=num_padding_rows))
        assert torch.isnan(driver.caches.kv[0]).all()
    for alone, padded in zip(*results, strict=True):
        assert_close(padded, alone)


def test_bfloat16_stays_near_float32(tmp_path):
    path = make_checkpoint(tmp_path, DENSE_WITH_MTP, dtype=torch.bfloat16)
    results = []
    for dtype in ("float32", "bfloat16"):
        model = load_model(path, dtype=dtype, mtp=True)
        (sequence,) = random_sequences(model.config.vocab_size, [40])
        results.append(MtpDriver(model, 1).step([(sequence, 40)])[0])
    assert results[1].dtype == torch.bfloat16
    assert (results[0] - results[1]).abs().mean() < 0.05 * results[0].abs().mean()


def test_the_bundled_models_first_drafts_are_mostly_the_targets_own_tokens(bundled_model):
    """A trained layer tells a wrong order or a wrong norm, to which random weights are blind."""
    tokenizer = Tokenizer.from_file(str(bundled_model / "tokenizer.json"))
    token_ids = tokenizer.encode(inspect.getsource(textwrap)).ids[:90]
    model = load_model(bundled_model, mtp=True)
    greedy = Driver(model, 1).step([(Sequence(0, token_ids), 90)])[0].argmax(-1)
    outputs = MtpDriver(model, 1).step([(Sequence(0, token_ids), 90)])[0]
    drafts = model.logits(outputs).argmax(-1)
    assert (drafts[:-2] == greedy[1:-1]).float().mean() > 0.5


def test_a_checkpoint_without_mtp_layers_is_refused_with_a_remedy(tmp_path):
    path = make_checkpoint(tmp_path, DENSE)
    with pytest.raises(ModelLoadError, match=r"num_nextn_predict_layers.*`drafter` ngram"):
        load_model(path, mtp=True)


def test_a_missing_mtp_tensor_is_named(tmp_path):
    path = make_checkpoint(tmp_path, DENSE_WITH_MTP)
    tensors = load_file(path / "model.safetensors")
    del tensors["mtp.layers.1.final_layernorm.weight"]
    save_file(tensors, path / "model.safetensors")
    assert load_model(path).mtp is None
    with pytest.raises(ModelLoadError, match=r"lacks tensor mtp\.layers\.1\.final_layernorm\.weight"):
        load_model(path, mtp=True)


def test_mtp_tensors_that_nobody_takes_are_logged_where_mtp_is_wanted(tmp_path, caplog):
    path = make_checkpoint(tmp_path, DENSE_WITH_MTP)
    with caplog.at_level(logging.WARNING):
        load_model(path, mtp=True)
    assert loading_lines(caplog) == []
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"mtp.layers.0.gate.weight": torch.ones(64)}, path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        load_model(path)
    assert loading_lines(caplog) == []
    with caplog.at_level(logging.WARNING):
        load_model(path, mtp=True)
    assert "mtp.layers.0.gate.weight" in caplog.text


def test_several_predictions_loop_one_set_of_layers_and_several_sets_are_refused(tmp_path):
    shape = replace(DENSE_WITH_MTP, extra_config={"num_nextn_predict_layers": 2})
    path = make_checkpoint(tmp_path, shape)
    assert json.loads((path / "config.json").read_text())["num_nextn_predict_layers"] == 2
    load_model(path, mtp=True)
    tensors = load_file(path / "model.safetensors")
    second = {
        name.replace("mtp.layers.0", "mtp.layers.2").replace("mtp.layers.1", "mtp.layers.3"): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("mtp.")
    }
    save_file(tensors | second, path / "model.safetensors")
    load_model(path)
    with pytest.raises(ModelLoadError, match=r"is 2 and each .*mtp\.layers\.2\.enorm\.weight.*ngram"):
        load_model(path, mtp=True)


def test_a_mamba_layer_is_refused_only_where_mtp_is_wanted(tmp_path):
    path = make_checkpoint(tmp_path, replace(DENSE, mtp_pattern="*M"))
    model = load_model(path)
    model.config.cache_spec()
    for ask in (lambda: load_model(path, mtp=True), lambda: model.config.cache_spec(mtp=True)):
        with pytest.raises(ModelLoadError, match=r"attention, mamba; a recurrent layer .*`drafter` ngram"):
            ask()
