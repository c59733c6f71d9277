"""Attention with each family's options gives transformers' results: in chunks, in decode rows, divided among
ranks, and recorded as a graph.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import GraniteMoeHybridConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3NextConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from engine.checkpoint.config_fields import ConfigFields
from engine.checkpoint.mixer_config import AttentionConfig, HeadNormConfig
from engine.checkpoint.rotary_config import RotaryConfig
from engine.checkpoint.weights import WeightFiles
from engine.memory.caches import CacheSpec
from engine.models.layers.attention import Attention
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from testing.engines.layer_driver import HIDDEN, LayerDriver, chunks_and_decoded_tokens, layer_sequences

SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# What differs from plain attention, transformers' layer and its rotary embedding.
CASES = {
    "llama, biased": (
        {"bias": True, "out_bias": True},
        LlamaAttention,
        LlamaConfig(**SIZES, attention_bias=True, rope_parameters=LLAMA3),
        LlamaRotaryEmbedding,
    ),
    "qwen2": ({"bias": True}, Qwen2Attention, Qwen2Config(**SIZES), LlamaRotaryEmbedding),
    "qwen3": (
        {"head_norms": HeadNormConfig(1e-6)},
        Qwen3Attention,
        Qwen3Config(**SIZES),
        LlamaRotaryEmbedding,
    ),
    "qwen3-next": (
        {"head_norms": HeadNormConfig(1e-6, offset=1.0), "output_gate": True},
        Qwen3NextAttention,
        Qwen3NextConfig(**SIZES, partial_rotary_factor=0.25),
        Qwen3NextRotaryEmbedding,
    ),
    "granite without positions": (
        {"scale": 0.3},
        GraniteMoeHybridAttention,
        GraniteMoeHybridConfig(
            **{key: value for key, value in SIZES.items() if key != "head_dim"},
            attention_multiplier=0.3,
            mamba_n_heads=8,
        ),
        None,
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES, scope="module")
def layer(request, tmp_path_factory):
    """Our configuration of a layer, its weights on disk, transformers' layer and rotary embedding."""
    options, attention, config, rotary_embedding = request.param
    torch.manual_seed(0)
    theirs = attention(config, 0).eval()
    for name, parameter in theirs.named_parameters():
        std = 0.3 if "norm" in name or "bias" in name else 2.0 / parameter.shape[-1] ** 0.5
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=std)
    directory = tmp_path_factory.mktemp("layer")
    save_file(theirs.state_dict(), directory / "model.safetensors")
    head_dim = theirs.head_dim
    if rotary_embedding is not None:
        fields = ConfigFields(path="config.json", raw=config.to_dict())
        options = {**options, "rotary": RotaryConfig.read(fields, head_dim)}
    return SimpleNamespace(
        config=AttentionConfig(4, 2, head_dim, **{"scale": head_dim**-0.5, **options}),
        directory=directory,
        theirs=theirs,
        rotary_embedding=rotary_embedding and rotary_embedding(config),
    )


def driver_of(layer, mixer, num_sequences, kv_heads=2):
    nothing = ("conv_channels", "mamba_layers", "mamba_heads", "mamba_head_dim", "state_size")
    spec = CacheSpec(
        attn_layers=1,
        kv_heads=kv_heads,
        head_dim=layer.config.head_dim,
        kv_dtype=torch.float32,
        conv_width=1,
        conv_dtype=torch.float32,
        ssm_dtype=torch.float32,
        **dict.fromkeys(nothing, 0),
    )
    return LayerDriver(mixer, spec, num_sequences)


def load(layer, tp=ALONE):
    return Attention(layer.config, HIDDEN, WeightFiles(layer.directory), "", tp, 0)


@torch.inference_mode()
def expected(layer, table, sequence):
    x = table[sequence.token_ids][None]
    length = x.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    positions = torch.arange(length)[None]
    cos_sin = None if layer.rotary_embedding is None else layer.rotary_embedding(x, positions)
    return layer.theirs(x, position_embeddings=cos_sin, attention_mask=mask)[0][0]


def assert_as_transformers(layer, driver, sequence, found):
    wanted = expected(layer, driver.table, sequence)
    torch.testing.assert_close(found, wanted[-len(found) :], rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_chunks_and_decoded_tokens_together_are_transformers_layer(layer):
    driver = driver_of(layer, load(layer), 3)
    for sequence, outputs in chunks_and_decoded_tokens(driver):
        assert_as_transformers(layer, driver, sequence, outputs)


def test_summands_of_two_ranks_add_up_to_the_layer(layer):
    (sequence,) = layer_sequences(30)
    total = 0
    for rank in range(2):
        driver = driver_of(layer, load(layer, TensorParallel(rank, 2)), 1, kv_heads=1)
        sequence.num_computed = 0
        total = total + driver.step([(sequence, 30)])[0]
    assert_as_transformers(layer, driver, sequence, total)


def test_a_recorded_step_follows_positions_and_inputs(layer):
    driver = driver_of(layer, load(layer), 2)
    sequences = layer_sequences(20, 30)
    driver.step([(seq, len(seq.token_ids) - 4) for seq in sequences])
    driver.step_speculative(sequences, 2)
    first = driver.batches[-1]
    graph, x, y = driver.record(first)
    for seq in sequences:
        seq.num_computed += 2
    plain = torch.cat(driver.step_speculative(sequences, 2))
    second = driver.batches[-1]
    with torch.inference_mode():
        x.copy_(driver.table[second.input_ids])
        first.positions.copy_(second.positions)
        first.slot_mapping.copy_(second.slot_mapping)
        first.decode.seq_lens.copy_(second.decode.seq_lens)
    graph.replay()
    assert torch.equal(y, plain)
