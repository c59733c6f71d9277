"""Rotary frequencies from every published form of configuration, compared with transformers."""

import json

import pytest
import torch
from transformers import BambaConfig, FalconH1Config, GraniteMoeHybridConfig, LlamaConfig, Qwen3NextConfig
from transformers.models.bamba.modeling_bamba import BambaRotaryEmbedding
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RotaryEmbedding
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from engine.checkpoint.config_fields import ConfigFields
from engine.checkpoint.rotary_config import RotaryConfig
from wire.errors import ModelLoadError

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn, own ramp": {"rope_type": "yarn", **YARN, "beta_fast": 24, "beta_slow": 2, "truncate": False},
    "yarn, DeepSeek's scaling": {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, given scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
}


def read(config, head_dim, **defaults):
    return RotaryConfig.read(ConfigFields(path="config.json", raw=config), head_dim, **defaults)


def assert_same(rotary, expected):
    """To the bit."""
    assert torch.equal(rotary.on("cpu").inv_freq, expected.inv_freq)
    assert rotary.attention_scaling == expected.attention_scaling


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_are_the_bits_of_transformers(scaling, head_dim):
    expected = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=head_dim,
            max_position_embeddings=131_072,
            rope_parameters={"rope_theta": 500_000.0, **scaling},
        )
    )
    base = {"max_position_embeddings": 131_072}
    assert_same(read(base | {"rope_parameters": {"rope_theta": 500_000.0, **scaling}}, head_dim), expected)
    older = dict(scaling)
    older["type"] = older.pop("rope_type")
    assert_same(read(base | {"rope_theta": 500_000.0, "rope_scaling": older}, head_dim), expected)


@pytest.mark.parametrize(
    ("family", "rotary_embedding", "arguments", "defaults"),
    [
        (BambaConfig, BambaRotaryEmbedding, {}, {"partial_rotary_factor": 0.5}),
        (GraniteMoeHybridConfig, GraniteMoeHybridRotaryEmbedding, {"rope_theta": 10_000_000.0}, {}),
        (FalconH1Config, FalconH1RotaryEmbedding, {"rope_theta": 100_000_000_000.0}, {}),
        (Qwen3NextConfig, Qwen3NextRotaryEmbedding, {}, {"partial_rotary_factor": 0.25}),
        (
            Qwen3_5TextConfig,
            Qwen3_5TextRotaryEmbedding,
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000_000,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10],
                    "mrope_interleaved": True,
                }
            },
            {},
        ),
    ],
)
def test_the_families_own_files_are_understood(tmp_path, family, rotary_embedding, arguments, defaults):
    config = family(**arguments)
    config.save_pretrained(tmp_path)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    saved = json.loads((tmp_path / "config.json").read_text())
    older = {**saved, **saved["rope_parameters"]}
    del older["rope_parameters"]
    for raw in (saved, older):
        assert_same(read(raw, head_dim, **defaults), rotary_embedding(config))


def test_text_turns_by_one_position_where_images_have_three():
    config = Qwen3_5TextConfig(rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25})
    positions = torch.tensor([[0, 5, 900]])
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), positions[None].expand(3, 1, 3))
    raw = {"rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]}, "rope_theta": 1e7}
    rotary = read(raw, config.head_dim, partial_rotary_factor=0.25).on("cpu")
    angles = positions[0].float()[:, None] * rotary.inv_freq
    torch.testing.assert_close(cos[0], torch.cat((angles.cos(), angles.cos()), dim=1))
    torch.testing.assert_close(sin[0], torch.cat((angles.sin(), angles.sin()), dim=1))


def test_a_length_beside_the_parameters_counts():
    scaling = {"type": "yarn", "factor": 4.0}
    base = {"max_position_embeddings": 131_072, "rope_scaling": scaling}
    inside = read(base | {"rope_scaling": {**scaling, "original_max_position_embeddings": 4096}}, 64)
    assert read(base | {"original_max_position_embeddings": 4096}, 64) == inside
    assert read(base, 64) != inside


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope_type is 'longrope'; expected default or linear or",
        ),
        ({"rope_scaling": {"type": "su"}}, "type is 'su'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; expected a number"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "beta": 1}},
            "beta of the rotary embedding is 1",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}},
            "more than low_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "a set for each layer type"),
        ({"rope_parameters": [1]}, "rope_parameters is \\[1\\]; expected an object or null"),
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor is 0.7; expected an even part of the 30"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(raw, message):
    with pytest.raises(ModelLoadError, match=message):
        read({"max_position_embeddings": 4096, **raw}, 30)
