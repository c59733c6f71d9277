"""The Triton kernels of replays compile for Hopper without a GPU and without spills. They add up a state's
row in the order of the slots form."""

import pytest

from testing.kernels.compiled import output_of

COMPILE = """
import re

import torch

from kernels.gated_delta import gated_delta_update
from kernels.replay import (
    causal_conv1d_replay, gated_delta_flush, gated_delta_replay, selective_state_flush, selective_state_replay
)
from kernels.ssm import causal_conv1d, selective_state_update
from testing.kernels.sm_90 import compile_kernel

INTEGERS = ("read_slots", "write_slots", "counts", "seq_lens")
FLOATS = ("A", "D", "dt_bias", "kept_gates")
TYPES = {
    "*": "*" + DTYPE, "dt_min": "fp32", "dt_max": "fp32", "scale": "fp32", "norm_eps": "fp32",
    "state_ptr": STATE, "rows_ptr": "*i64",
    **{f"{name}_ptr": "*i32" for name in INTEGERS}, **{f"{name}_ptr": "*fp32" for name in FLOATS},
}
CONV_TYPES, DELTA_TYPES = {**TYPES, "state_ptr": "*" + DTYPE}, {**TYPES, "kept_k_ptr": "*fp32"}
dtype = torch.bfloat16 if DTYPE == "bf16" else torch.float32
state_dtype = torch.bfloat16 if STATE == "*bf16" else torch.float32
ssm = selective_state_update.tile_request(dtype, state_dtype, 64, 128).default
replayed = selective_state_update.replay_tile_request(dtype, state_dtype, 64, 128).default
OTHERS = (64, 256), (128, 256), (16, 16), (32, 16), (64, 64), (64, 16)
delta = gated_delta_update.tile_request(dtype, state_dtype, 128, 128).default
delta_replayed = gated_delta_update.replay_tile_request(dtype, state_dtype, 128, 128).default
conv = causal_conv1d.decode_tile_request(dtype, 4, POSITIONS).default
POSITION = {"NUM_POSITIONS": POSITIONS}
PLACES, STOCHASTIC = {"PLACES": 2 * POSITIONS}, {"STOCHASTIC": STATE == "*bf16"}
SSM = {"HEADS_PER_GROUP": 16, "BLOCK_N": 128, **STOCHASTIC}
DELTA = {"HEADS_PER_KEY_HEAD": 2, "BLOCK_K": 128, **STOCHASTIC}
CONV, BIAS = {"NUM_TAPS": 4}, {"HAS_BIAS": True}
FAMILIES = [
    (SSM, ssm, TYPES, [
        (selective_state_update._update_tiles_kernel, POSITION),
        (selective_state_replay._replay_tiles_kernel, POSITION | PLACES | replayed),
        (selective_state_flush._flush_tiles_kernel, PLACES | replayed),
    ]),
    (DELTA, delta, DELTA_TYPES, [
        (gated_delta_update._update_tiles_kernel, POSITION),
        (gated_delta_replay._replay_tiles_kernel, POSITION | PLACES | delta_replayed),
        (gated_delta_flush._flush_tiles_kernel, PLACES | delta_replayed),
    ]),
    (CONV, conv, CONV_TYPES, [
        (causal_conv1d._convolve_positions_kernel, POSITION | BIAS),
        (causal_conv1d_replay._replay_positions_kernel, POSITION | BIAS | PLACES),
        (causal_conv1d_replay._flush_windows_kernel, PLACES),
    ]),
]

def layouts_of_sums(ttgir):
    # How the compiler divides the operands of sums among threads, which decides the order of each sum.
    aliases = dict(re.findall(r"^(#\\w+) = (.+)$", ttgir, re.MULTILINE))
    found = re.findall(r"\\}\\) : \\(tensor<([^(]+)>\\) ->", ttgir)
    named = {re.sub(r"#\\w+", lambda alias: aliases.get(alias[0], alias[0]), operand) for operand in found}
    # The number of a tile's rows, and of the warps that share them, are no part of a row's sum.
    return {re.sub(r"^\\d+x|warpsPerCTA = \\[\\d+, 1\\], ", "", operand) for operand in named}

for constants, tiles, types, kernels in FAMILIES:
    layouts = []
    for kernel, more in kernels:
        settings = {**constants, **tiles, **more}
        options = {name: settings.pop(name) for name in list(settings) if name.startswith("num_")}
        compiled = compile_kernel(kernel, settings, types, **options)
        print("compiled", kernel.__name__, compiled.registers, compiled.stack_bytes)
        assert compiled.stack_bytes == 0
        layouts.append(layouts_of_sums(compiled.ttgir))
        if constants is not CONV:
            assert "ld.global.v4.b32" in compiled.ptx  # the state, 16 bytes a load
    if constants is not CONV:  # it sums up in an order that is written out
        print("sums", layouts[0])
        assert layouts[0] and layouts[1] == layouts[0] and layouts[2] <= layouts[0], layouts

for head_dim, state_dim in OTHERS:
    layouts = []
    for kernel, request, more in (
        (selective_state_update._update_tiles_kernel, selective_state_update.tile_request, {}),
        (selective_state_replay._replay_tiles_kernel, selective_state_update.replay_tile_request, PLACES),
    ):
        tiles = request(dtype, state_dtype, head_dim, state_dim).default
        settings = {**SSM, **POSITION, **more, **tiles, "BLOCK_N": state_dim}
        options = {name: settings.pop(name) for name in list(settings) if name.startswith("num_")}
        layouts.append(layouts_of_sums(compile_kernel(kernel, settings, TYPES, **options).ttgir))
    print("compared", head_dim, state_dim)
    assert layouts[0] == layouts[1], (head_dim, state_dim, layouts)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "state", "positions"),
    [
        ("bf16", "*fp32", 4),
        ("fp32", "*fp32", 2),
        ("bf16", "*bf16", 4),  # rounded stochastically
    ],
)
def test_replays_compile_and_add_up_like_the_slots_form(dtype, state, positions):
    output = output_of(COMPILE, DTYPE=dtype, STATE=state, POSITIONS=positions)
    assert output.count("compiled") == 9
    assert output.count("compared") == 6
