"""The size of weights computed from a configuration is the size that loading them allocates."""

from dataclasses import replace

import pytest
import torch

from engine.checkpoint.weights import WeightFiles
from engine.cost.weight_size import weight_bytes
from engine.models import build_model, read_config
from testing.checkpoints.random_checkpoint import (
    DENSE,
    DENSE_WITH_MTP,
    LATENT_MOE,
    MOE_WITH_MTP,
    WITH_MOE,
    make_checkpoint,
)

BIASED = replace(WITH_MOE, use_bias=True, mlp_bias=True, use_conv_bias=False)


class CountedWeights(WeightFiles):
    """Adds up what is taken, in the dtype in which it is kept."""

    num_bytes = 0

    def take(self, name, shape, **wanted):
        tensor = super().take(name, shape, **wanted)
        self.num_bytes += tensor.numel() * tensor.itemsize
        return tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [DENSE, WITH_MOE, LATENT_MOE, BIASED], ids=["dense", "moe", "latent", "bias"]
)
def test_the_size_by_configuration_is_what_the_loader_takes(tmp_path, shape, dtype):
    make_checkpoint(tmp_path, shape)
    config = read_config(tmp_path, dtype)
    weights = CountedWeights(tmp_path, dtype=config.dtype)
    build_model(config, weights)
    assert weight_bytes(config) == weights.num_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [DENSE_WITH_MTP, MOE_WITH_MTP], ids=["dense", "moe"])
def test_the_mtp_layer_counts_where_it_is_wanted(tmp_path, shape, dtype):
    make_checkpoint(tmp_path, shape)
    config = read_config(tmp_path, dtype)
    for mtp in (False, True):
        weights = CountedWeights(tmp_path, dtype=config.dtype)
        build_model(config, weights, mtp=mtp)
        assert weight_bytes(config, mtp=mtp) == weights.num_bytes


def test_a_tied_output_head_counts_once(tmp_path):
    make_checkpoint(tmp_path, DENSE)
    config = read_config(tmp_path, "float32")
    tied = replace(config, tie_word_embeddings=True)
    head = config.vocab_size * config.hidden_size * torch.float32.itemsize
    assert weight_bytes(config) - weight_bytes(tied) == head
