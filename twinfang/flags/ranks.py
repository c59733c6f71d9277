"""Flags of ranks: processes that share one model, and servers that share its experts."""

from __future__ import annotations

from twinfang.flags.flag import Flag
from twinfang.flags.values import address, integer, yes_or_no

TENSOR_PARALLEL = Flag(
    *("--tensor-parallel", "N", integer(1, 64)),
    "ranks that share the model: processes of one server, each with a GPU where there are any",
    default=1,
)
PREFILL_TENSOR_PARALLEL = Flag(
    *("--prefill-tensor-parallel", "N", integer(1, 64), "the same of prefill servers alone"),
    default_text="--tensor-parallel",
)
NNODES = Flag(
    *("--nnodes", "N", integer(1, 64)),
    "hosts that this server's tensor-parallel ranks are spread over evenly; the command is given on each; "
    "host 0 has its ports",
    default=1,
    setting="nodes.size",
)
NODE_RANK = Flag(
    *("--node-rank", "R", integer(0, 63), "which of these hosts this is; 0 has the server's ports"),
    default_text="what LeaderWorkerSet or torchrun say in the environment",
    setting="nodes.rank",
)
DIST_INIT_ADDR = Flag(
    *("--dist-init-addr", "HOST:PORT", address, "where host 0 is met by the others"),
    default_text="what LeaderWorkerSet or torchrun say",
    setting="nodes.store",
)
DATA_PARALLEL_SIZE = Flag(
    *("--data-parallel-size", "D", integer(1, 256)),
    "ranks that serve side by side, each a decode server with a port of its own: --port and those behind it, "
    "metrics likewise",
    default=1,
    setting="data_parallel.size",
)
DATA_PARALLEL_RANK = Flag(
    *("--data-parallel-rank", "R", integer(0, 255)),
    "which of them this process is; --port is its own",
    default_text="what LeaderWorkerSet or torchrun say in the environment, else all are started on this host",
    setting="data_parallel.rank",
)
DATA_PARALLEL_ADDRESS = Flag(
    *("--data-parallel-address", "HOST:PORT", address, "where rank 0 is met by the others"),
    default_text="what LeaderWorkerSet or torchrun say, else a free port of this host",
    setting="data_parallel.store",
)
LOCAL_RANK = Flag(
    *("--local-rank", "R", integer(0, 255), "which of this host's ranks it is: whose GPUs it takes"),
    default=0,
    is_internal=True,
)
EXPERT_PARALLEL = Flag(
    *("--enable-expert-parallel", "", yes_or_no),
    "all ranks share the experts of each layer: every expert is whole on one of them, and every step is "
    "computed by all ranks together",
    default=False,
    default_text="off",
    is_switch=True,
    setting="expert_parallel",
)

NODES = (NNODES, NODE_RANK, DIST_INIT_ADDR)
RANKS = (DATA_PARALLEL_SIZE, EXPERT_PARALLEL)
RANK_PLACE = (DATA_PARALLEL_RANK, DATA_PARALLEL_ADDRESS, LOCAL_RANK)
