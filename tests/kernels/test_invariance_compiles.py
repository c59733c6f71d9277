"""What the order of operations in compiled kernels must not depend on, read from their code for Hopper."""

from testing.kernels.compiled import output_of

COMPILE = """
import re
from collections import Counter

import torch

from kernels.attention import paged_attention_decode
from kernels.ssm import selective_state_update
from testing.kernels.sm_90 import compile_kernel

FLOATS = r"(?:[a-z0-9]+\\.)+f(?:16|32)\\S*|(?:wgmma.mma_async|mma).sync.aligned.\\S+|cvt\\S*bf16\\S*"
TYPES = {
    "*": "*bf16", "state_ptr": "*fp32",
    **{name: "fp32" for name in ("scale_log2", "v_scale", "dt_min", "dt_max")},
    **{f"{n}_ptr": "*i32" for n in ("block_table", "seq_lens", "read_slots", "write_slots")},
    **{f"{n}_ptr": "*fp32" for n in ("partial", "lse", "A", "D", "dt_bias")},
}

def operations(kernel, constants, tiles):
    options = {name: value for name, value in tiles.items() if name.startswith("num_")}
    constants = constants | {name: value for name, value in tiles.items() if name not in options}
    return Counter(re.findall(FLOATS, compile_kernel(kernel, constants, TYPES, **options).ptx))

decode = dict(paged_attention_decode.tile_request(torch.bfloat16, 4, 128, 16, 4).default)
del decode["PROGRAMS_PER_SM"]
DECODE = {
    "HEAD_DIM": 128, "BLOCK_SIZE": 16, "BLOCK_D": 128, "PRECISION": "tf32", "NUM_HEADS": 32, "BLOCK_M": 16,
    "HEADS_PER_KV": 4, "POSITIONS": 4, "IS_SPLIT": True, "MIN_SPLIT": 1024,
}
one, four = (
    operations(paged_attention_decode._decode_kernel, {**DECODE, "NUM_POSITIONS": t}, decode) for t in (1, 4)
)
assert one == four, (one - four, four - one)
print("attention", one.total())

update = selective_state_update.tile_request(torch.bfloat16, torch.float32, 64, 128).default
STATE = {"HEADS_PER_GROUP": 16, "BLOCK_N": 128, "STOCHASTIC": False}
one, four = (
    operations(selective_state_update._update_tiles_kernel, {**STATE, "NUM_POSITIONS": t}, update)
    for t in (1, 4)
)
moved = {name for name in four if name.startswith(("mov", "ld", "st"))}
assert all(four[name] == 4 * one[name] for name in set(one) | set(four) if name not in moved), (one, four)
print("update", one.total())
"""


def test_a_position_is_computed_by_the_same_operations_for_any_number_of_positions():
    """The compiler decides alone which products and sums it fuses; it decides alike for 1 and 4 positions."""
    assert output_of(COMPILE).split()[::2] == ["attention", "update"]
