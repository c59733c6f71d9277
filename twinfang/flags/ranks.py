"""Flags for ranks: processes that share one model, and servers that share its experts."""

from __future__ import annotations

from twinfang.flags.flag import Flag
from twinfang.flags.values import address, integer, yes_or_no

TENSOR_PARALLEL = Flag(
    *("--tensor-parallel", "N", integer(1, 64)),
    "number of ranks that share the model: processes of one server, each with its own GPU if there are GPUs",
    default=1,
)
PREFILL_TENSOR_PARALLEL = Flag(
    *("--prefill-tensor-parallel", "N", integer(1, 64), "--tensor-parallel of the prefill servers"),
    default_text="--tensor-parallel",
)
NNODES = Flag(
    *("--nnodes", "N", integer(1, 64)),
    "number of hosts over which this server's tensor-parallel ranks are spread evenly; run the command on "
    "each host; host 0 has the server's ports",
    default=1,
    setting="nodes.size",
)
NODE_RANK = Flag(
    *("--node-rank", "R", integer(0, 63), "number of this host among --nnodes; 0 has the server's ports"),
    default_text="set by LeaderWorkerSet or torchrun in the environment",
    setting="nodes.rank",
)
DIST_INIT_ADDR = Flag(
    *("--dist-init-addr", "HOST:PORT", address, "address at which the other hosts reach host 0"),
    default_text="set by LeaderWorkerSet or torchrun in the environment",
    setting="nodes.store",
)
DATA_PARALLEL_SIZE = Flag(
    *("--data-parallel-size", "D", integer(1, 256)),
    "number of ranks that serve side by side; each rank is a decode server with a port and a metrics port of "
    "its own, counted up from --port and --metrics-port",
    default=1,
    setting="data_parallel.size",
)
DATA_PARALLEL_RANK = Flag(
    *("--data-parallel-rank", "R", integer(0, 255)),
    "rank of this process among --data-parallel-size; --port is then its own port",
    default_text="set by LeaderWorkerSet or torchrun in the environment, else all ranks start on this host",
    setting="data_parallel.rank",
)
DATA_PARALLEL_ADDRESS = Flag(
    *("--data-parallel-address", "HOST:PORT", address, "address at which the other ranks reach rank 0"),
    default_text="set by LeaderWorkerSet or torchrun in the environment, else a free port of this host",
    setting="data_parallel.store",
)
LOCAL_RANK = Flag(
    *("--local-rank", "R", integer(0, 255), "number of this rank on its host; it chooses the GPUs"),
    default=0,
    is_internal=True,
)
EXPERT_PARALLEL = Flag(
    *("--enable-expert-parallel", "", yes_or_no),
    "all ranks share the experts of each layer: each expert is entirely on one rank, and all ranks compute "
    "every step together",
    default=False,
    default_text="off",
    is_switch=True,
    setting="expert_parallel",
)

NODES = (NNODES, NODE_RANK, DIST_INIT_ADDR)
RANKS = (DATA_PARALLEL_SIZE, EXPERT_PARALLEL)
RANK_PLACE = (DATA_PARALLEL_RANK, DATA_PARALLEL_ADDRESS, LOCAL_RANK)
