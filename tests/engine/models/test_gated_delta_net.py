"""The Gated DeltaNet mixer, in both orders that checkpoints store, gives transformers' results: in chunks, in
decode rows, divided among ranks, and recorded as a graph.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3NextConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from engine.checkpoint.config_fields import ConfigFields
from engine.checkpoint.mixer_config import GatedDeltaNetConfig
from engine.checkpoint.model_shard import GatedDeltaShard
from engine.checkpoint.weights import WeightFiles
from engine.memory.caches import CacheSpec
from engine.models.layers.gated_delta_net import GatedDeltaNet
from engine.parallel.tensor_parallel import ALONE, TensorParallel
from testing.engines.layer_driver import HIDDEN, LayerDriver, chunks_and_decoded_tokens, layer_sequences
from wire.errors import ModelLoadError

EPS = 1e-6
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
CASES = {
    "interleaved (qwen3-next)": (True, Qwen3NextGatedDeltaNet, Qwen3NextConfig(**SIZES)),
    "one after the other (qwen3.5)": (False, Qwen3_5GatedDeltaNet, Qwen3_5TextConfig(**SIZES)),
}


@pytest.fixture(params=CASES.values(), ids=CASES, scope="module")
def layer(request, tmp_path_factory):
    """Our configuration of a layer, its weights on disk and transformers' layer."""
    interleaved, net, config = request.param
    torch.manual_seed(0)
    theirs = net(config, 0).eval()
    for name, parameter in theirs.named_parameters():
        if "A_log" not in name:
            mean = {"norm.weight": 1.0, "dt_bias": -1.0}.get(name, 0.0)
            std = {"norm.weight": 0.2, "dt_bias": 1.0, "conv1d.weight": 0.5}.get(name, HIDDEN**-0.5)
            torch.nn.init.normal_(parameter, mean, std)
    directory = tmp_path_factory.mktemp("layer")
    save_file(theirs.state_dict(), directory / "model.safetensors")
    fields = ConfigFields(path="config.json", raw=config.to_dict())
    ours = GatedDeltaNetConfig.read(fields, interleaved=interleaved)
    return SimpleNamespace(config=ours, directory=directory, theirs=theirs)


def driver_of(mixer, num_sequences):
    heads, head_dim, state_size = mixer.config.state_shape
    spec = CacheSpec(
        attn_layers=0,
        kv_heads=1,
        head_dim=1,
        kv_dtype=torch.float32,
        mamba_layers=1,
        conv_channels=mixer.config.conv_channels,
        conv_width=mixer.config.conv_width,
        mamba_heads=heads,
        mamba_head_dim=head_dim,
        state_size=state_size,
        conv_dtype=torch.float32,
        ssm_dtype=torch.float32,
    )
    return LayerDriver(mixer, spec, num_sequences)


def load(layer, tp=ALONE):
    return GatedDeltaNet(layer.config, HIDDEN, EPS, WeightFiles(layer.directory), "", tp, 0)


@torch.inference_mode()
def assert_as_transformers(layer, driver, sequence, found):
    wanted = layer.theirs(driver.table[sequence.token_ids][None])[0]
    torch.testing.assert_close(found, wanted[-len(found) :], rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_chunks_and_decoded_tokens_together_are_transformers_layer(layer):
    driver = driver_of(load(layer), 3)
    for sequence, outputs in chunks_and_decoded_tokens(driver):
        assert_as_transformers(layer, driver, sequence, outputs)


def test_a_step_of_several_positions_goes_on_from_any_of_them(layer):
    driver = driver_of(load(layer), 1)
    (sequence,) = layer_sequences(20)
    outputs = driver.step([(sequence, 12)])
    for accepted in (2, 1, 3):
        (rows,) = driver.step_speculative([sequence], 3)
        outputs.append(rows[:accepted])
        sequence.num_computed += accepted
        sequence.slot = sequence.slots[accepted - 1]
    found = torch.cat(outputs)
    sequence.token_ids = sequence.token_ids[: len(found)]
    assert_as_transformers(layer, driver, sequence, found)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_summands_of_ranks_add_up_to_the_layer(layer, num_ranks):
    """Of four ranks two have a copy of each key head."""
    (sequence,) = layer_sequences(30)
    total = 0
    for rank in range(num_ranks):
        driver = driver_of(load(layer, TensorParallel(rank, num_ranks)), 1)
        sequence.num_computed = 0
        total = total + torch.cat([*driver.step([(sequence, 29)]), *driver.step([(sequence, 1)])])
    assert_as_transformers(layer, driver, sequence, total)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_shares_of_the_convolution_cover_its_channels(layer, num_ranks):
    """What is divided stands in the first of a share's three ranges, what may be copied in the others."""
    config, covered = layer.config, torch.zeros(layer.config.conv_channels, dtype=torch.int64)
    for rank in range(num_ranks):
        ranges = GatedDeltaShard.of(config, TensorParallel(rank, num_ranks)).conv_rows
        assert len(ranges) == 3
        for start, stop in ranges:
            covered[start:stop] += 1
    copies = max(1, num_ranks // config.num_key_heads)
    assert (covered[: config.value_size] == 1).all()
    assert (covered[config.value_size :] == copies).all()


def test_a_recorded_step_follows_inputs_and_states(layer):
    driver = driver_of(load(layer), 2)
    sequences = layer_sequences(20, 30)
    driver.step([(seq, len(seq.token_ids) - 4) for seq in sequences])
    before = driver.caches.state.clone()
    driver.step_speculative(sequences, 2)
    graph, x, y = driver.record(driver.batches[-1])
    for seq in sequences:
        seq.num_computed += 2
    driver.caches.state.copy_(before)
    plain = torch.cat(driver.step_speculative(sequences, 2))
    after = driver.caches.state.clone()
    driver.caches.state.copy_(before)
    with torch.inference_mode():
        x.copy_(driver.table[driver.batches[-1].input_ids])
    graph.replay()
    assert torch.equal(y, plain)
    assert torch.equal(driver.caches.state[1:], after[1:])


def test_value_heads_that_key_heads_do_not_divide_are_refused():
    fields = ConfigFields(path="config.json", raw=SIZES | {"linear_num_value_heads": 7})
    with pytest.raises(ModelLoadError, match=r"linear_num_value_heads is 7.*a multiple of.*2"):
        GatedDeltaNetConfig.read(fields, interleaved=True)
