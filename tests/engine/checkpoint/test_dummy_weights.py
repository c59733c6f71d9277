"""Random weights: equal on all machines, finite in a model, and never mistaken for a checkpoint's weights."""

from __future__ import annotations

import shutil

import pytest
import torch

from engine.checkpoint.dummy_weights import CHUNK, dummy_weights
from engine.checkpoint.fingerprint import fingerprint
from engine.checkpoint.weights import Part, of_inputs, of_outputs
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models import load_model, read_config
from engine.request import Request
from testing.checkpoints.random_checkpoint import MOE_WITH_MTP, make_checkpoint
from wire.errors import ModelLoadError
from wire.messages.sampling_params import SamplingParams

PROJECTION = "backbone.layers.0.mixer.in_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), MOE_WITH_MTP)


@pytest.fixture(scope="module")
def configuration(checkpoint, tmp_path_factory):
    """A directory with a config.json alone."""
    directory = tmp_path_factory.mktemp("configuration")
    shutil.copy(checkpoint / "config.json", directory)
    return directory


@pytest.fixture
def weights(configuration):
    return dummy_weights(configuration, read_config(configuration))


def test_values_are_what_they_have_always_been(weights):
    # Releases hand over to one another: with other values DUMMY_WEIGHTS (engine/checkpoint/fingerprint.py)
    # changes too.
    drawn = weights.take(PROJECTION, (3, 2))
    expected = [
        [0.20666050910949707, 0.7265721559524536],
        [1.134528636932373, -0.7781679034233093],
        [0.762119472026825, 0.7034902572631836],
    ]
    assert torch.equal(drawn, torch.tensor(expected))


def test_a_tensor_is_its_name_and_shape_whatever_was_taken_before(configuration, weights):
    first = weights.take(PROJECTION, (5, 7))
    weights.take("lm_head.weight", (5, 7))
    again = dummy_weights(configuration, read_config(configuration, "bfloat16"))
    assert torch.equal(weights.take(PROJECTION, (5, 7)), first)
    assert torch.equal(again.take(PROJECTION, (5, 7), dtype=torch.float32), first)
    assert torch.equal(again.take(PROJECTION, (5, 7)), first.to(torch.bfloat16))
    assert not torch.equal(weights.take(PROJECTION, (7, 5)).view(5, 7), first)
    assert not torch.equal(weights.take(PROJECTION.replace("0", "1"), (5, 7)), first)


def test_values_are_spread_evenly_over_all_chunks(weights):
    columns = 1024
    drawn = weights.take(PROJECTION, (2 * CHUNK // columns + 3, columns)) * columns**0.5
    for chunk in torch.split(drawn.view(-1), CHUNK)[:2]:
        assert chunk.mean().abs() < 0.01
        assert (chunk.std() - 1).abs() < 0.01
        counts = torch.histc(chunk, bins=16, min=-(3**0.5), max=3**0.5)
        assert counts.min() > 0.97 * CHUNK / 16
        assert len(chunk.unique()) > 0.9 * CHUNK
    assert not torch.equal(drawn.view(-1)[:CHUNK], drawn.view(-1)[CHUNK : 2 * CHUNK])
    assert (drawn[:-1, :-1] * drawn[1:, 1:]).mean().abs() < 0.01


def test_a_rank_has_its_part_of_the_whole(weights):
    whole = weights.take(PROJECTION, (12, 8))
    assert torch.equal(
        weights.take(PROJECTION, (12, 8), part=of_outputs((0, 2), (6, 9))), torch.cat([whole[:2], whole[6:9]])
    )
    assert torch.equal(weights.take(PROJECTION, (12, 8), part=of_inputs((4, 8))), whole[:, 4:])
    assert torch.equal(weights.take(PROJECTION, (12, 8), part=Part(1, ((0, 8),))), whole)


def test_a_model_of_random_weights_decodes_and_drafts(configuration):
    config = EngineConfig(
        configuration,
        "both",
        load_format="dummy",
        device="cpu",
        max_num_seqs=2,
        num_speculative=2,
        cache_memory_bytes=32 << 20,
    )
    engine = Engine(config)
    engine.add(Request("a", list(range(40)), SamplingParams(max_tokens=24, temperature=0)))
    outputs = [output for _ in range(40) for output in engine.step().outputs]
    tokens = [token for output in outputs for token in output.token_ids]
    assert outputs[-1].finish_reason in ("length", "stop")
    assert len(set(tokens)) > 3  # no constant, as from logits that are all alike


def test_logits_lie_a_few_units_apart(configuration):
    model = load_model(configuration, load_format="dummy", dtype="bfloat16")
    hidden = torch.randn(64, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert 2 < model.logits(hidden.bfloat16()).std() < 8


def test_random_weights_have_a_fingerprint_of_their_own(checkpoint, configuration, tmp_path):
    shutil.copy(configuration / "config.json", tmp_path)
    dummy = fingerprint(configuration, torch.float32, "dummy")
    assert dummy == fingerprint(tmp_path, torch.float32, "dummy")
    assert dummy == fingerprint(checkpoint, torch.float32, "dummy")
    assert dummy != fingerprint(checkpoint, torch.float32)
    assert dummy != fingerprint(configuration, torch.bfloat16, "dummy")
    with pytest.raises(ModelLoadError, match="holds no safetensors file"):
        fingerprint(configuration, torch.float32)
