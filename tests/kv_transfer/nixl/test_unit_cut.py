"""A rank's units are put together from a peer with another number of ranks: every byte once, in its place."""

import numpy as np
import pytest
import torch

from engine.checkpoint.model_shard import check_divides, shard_spec
from engine.memory.caches import Caches
from engine.models import read_config
from engine.parallel.tensor_parallel import TensorParallel
from kv_transfer.nixl.unit_cut import Piece, cut_unit
from testing.checkpoints.random_checkpoint import CheckpointShape, make_checkpoint
from wire.errors import ConfigError, HandshakeError

SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (1, 4), (4, 1), (4, 4)]
SHAPES = {
    "heads for all": CheckpointShape(num_key_value_heads=4, n_groups=4),
    "copied heads and groups": CheckpointShape(num_key_value_heads=2, n_groups=2),
    "one head, one group": CheckpointShape(num_key_value_heads=1, n_groups=1),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    return {
        name: read_config(make_checkpoint(tmp_path_factory.mktemp("cut"), shape, seed=1))
        for name, shape in SHAPES.items()
    }


@pytest.fixture(params=SHAPES)
def config(request, configs):
    return configs[request.param]


def pools(config, size):
    """Each rank's pools with one unit beside the null one, filled by what of the whole model stands there."""
    made = []
    for rank in range(size):
        spec = shard_spec(config, TensorParallel(rank, size), mtp=False)
        caches = Caches(spec, num_blocks=2, num_slots=2, block_size=4, device="cpu")
        for layout, pool in ((caches.kv_layout, caches.kv), (caches.state_layout, caches.state)):
            unit = pool.view(torch.uint8).view(2, -1)[1].numpy()
            unit[:] = 0
            for number, segment in enumerate(layout.segments):
                offset = segment.offset
                for start, stop in segment.ranges:
                    for entry in range(start, stop):
                        stride = segment.axes[0].stride
                        seed = np.random.default_rng([number, entry])
                        unit[offset : offset + stride] = seed.integers(1, 256, stride, dtype=np.uint8)
                        offset += stride
        made.append(caches)
    return made


def units(caches):
    return (
        (caches.kv_layout, caches.kv.view(torch.uint8).view(2, -1)[1].numpy()),
        (caches.state_layout, caches.state[1].numpy()),
    )


@pytest.mark.parametrize(("theirs", "ours"), SIZES)
def test_a_units_bytes_come_from_the_ranks_that_hold_them(config, theirs, ours):
    sources = [units(one) for one in pools(config, theirs)]
    for rank, wanted in enumerate(pools(config, ours)):
        for kind, (layout, expected) in enumerate(units(wanted)):
            found = np.zeros_like(expected)
            cuts = cut_unit(layout, [source[kind][0] for source in sources], rank=rank)
            num_bytes = 0
            for cut, source in zip(cuts, sources, strict=True):
                for piece in cut:
                    num_bytes += piece.num_bytes
                    part = source[kind][1][piece.remote : piece.remote + piece.num_bytes]
                    found[piece.local : piece.local + piece.num_bytes] = part
            assert np.array_equal(found, expected)
            held = sum(segment.num_bytes for segment in layout.segments)
            assert num_bytes == (layout.unit_bytes if theirs == ours == 1 else held)


def test_a_cut_of_kv_is_one_piece_and_one_of_the_convolution_three(configs):
    config = configs["heads for all"]
    whole = pools(config, 1)[0]
    half = pools(config, 2)[1]
    (kv,) = cut_unit(half.kv_layout, [whole.kv_layout], rank=1)
    assert kv == (Piece(0, whole.kv_layout.unit_bytes // 2, whole.kv_layout.unit_bytes // 2),)
    (state,) = cut_unit(half.state_layout, [whole.state_layout], rank=1)
    num_mamba = config.layer_types.count("mamba")
    assert len(state) <= (3 + 1) * num_mamba


def test_copies_of_a_head_are_read_from_different_ranks(configs):
    config = configs["one head, one group"]
    theirs = [one.kv_layout for one in pools(config, 4)]
    owners = []
    for rank, caches in enumerate(pools(config, 2)):
        cuts = cut_unit(caches.kv_layout, theirs, rank=rank)
        owners += [index for index, cut in enumerate(cuts) if cut]
    assert owners == [0, 1]


def test_what_no_rank_holds_is_an_error(config):
    theirs = [one.state_layout for one in pools(config, 4)]
    ours = pools(config, 1)[0].state_layout
    with pytest.raises(HandshakeError, match="no rank of the peer holds channels"):
        cut_unit(ours, theirs[:3], rank=0)


def test_a_number_of_ranks_that_does_not_divide_is_refused(config):
    with pytest.raises(ConfigError, match="`tensor_parallel` 3 does not divide"):
        check_divides(config, 3)
