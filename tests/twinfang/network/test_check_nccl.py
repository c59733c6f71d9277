"""What is picked out of NCCL's log, what is advised, the libraries looked for, and two ranks that sum."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from twinfang.network.libraries import IBVERBS, PACKAGES, Library, libraries
from twinfang.network.nccl_advice import advise_nccl
from twinfang.network.nccl_transport import RankFacts, picked_by_nccl, warnings
from twinfang.network.ucx_transport import Device, HostFacts
from twinfang.stack.ports import free_ports

TIMEOUT_S = 120
HEADER = "a:152:510 [0] NCCL "
SOCKETS = "\n".join(
    HEADER + line
    for line in (
        "INFO NCCL_IB_HCA set by environment to mlx5_9",
        "INFO Failed to open libibverbs.so[.1]",
        "INFO NET/Socket : Using [0]eth0:10.0.0.5<0>",
        "INFO Using network Socket",
        "INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0",
        "INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
        "INFO Connected all rings, use ring PXN 0 GDR 0",
    )
)
RDMA = "\n".join(
    HEADER + line
    for line in (
        "INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.5<0>",
        "INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA",
        "INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/IB/1/GDRDMA",
    )
)
PORT = Device("mlx5_0:1", True, 400.0)
HERE = RankFacts(
    HostFacts("a", "boot-a", "pid:[1]", 0, (PORT,), (), ()),
    tuple(Library(name, True) for name in PACKAGES),
    (),
)
THERE = dataclasses.replace(HERE, host=dataclasses.replace(HERE.host, hostname="b", boot_id="boot-b"))


def with_(facts: RankFacts, **variables: str) -> RankFacts:
    return dataclasses.replace(facts, variables=tuple(variables.items()))


@pytest.mark.parametrize(
    ("log", "kind", "paths", "devices"),
    [
        (SOCKETS, "sockets", ("NET/Socket/0",), ()),
        (RDMA, "RDMA", ("NET/IB/0/GDRDMA", "NET/IB/1/GDRDMA"), ("mlx5_0:1/RoCE", "mlx5_1:1/RoCE")),
        (f"{RDMA}\n{SOCKETS}", "sockets", None, None),
        (
            HEADER + "INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Libfabric/0/GDRDMA",
            "a plugin",
            None,
            (),
        ),
        (HEADER + "INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read", "GPU", None, ()),
        (HEADER + "INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct", "shared memory", None, ()),
        ("", "unknown", (), ()),
    ],
)
def test_the_slowest_transport_of_the_channels_is_found(log, kind, paths, devices):
    transport = picked_by_nccl(log)
    assert transport.kind == kind
    assert paths in (None, transport.paths)
    assert devices in (None, transport.devices)
    assert str(transport).startswith(kind)


def test_what_nccl_says_of_its_choice_is_kept():
    assert picked_by_nccl(SOCKETS).reasons == (
        "NCCL_IB_HCA set by environment to mlx5_9",
        "Failed to open libibverbs.so[.1]",
    )
    assert warnings(HEADER + "WARN Call to ibv_modify_qp failed") == ["Call to ibv_modify_qp failed"]


WITHOUT_VERBS = dataclasses.replace(THERE, libraries=(Library(IBVERBS, False),))
WITHOUT_CARDS = dataclasses.replace(THERE, host=dataclasses.replace(THERE.host, rdma=()))
SAME_HOST = dataclasses.replace(THERE, host=dataclasses.replace(THERE.host, boot_id="boot-a"))


@pytest.mark.parametrize(
    ("log", "here", "there", "parts"),
    [
        (RDMA, HERE, THERE, []),
        (RDMA.replace("/GDRDMA", ""), HERE, THERE, ["hint", "no GPUDirect RDMA", "nvidia-peermem"]),
        (SOCKETS, HERE, WITHOUT_VERBS, ["problem", f"{IBVERBS} is missing on b", "install libibverbs1"]),
        (SOCKETS, with_(HERE, NCCL_IB_DISABLE="1"), THERE, ["problem", "NCCL_IB_DISABLE is set on a"]),
        (SOCKETS, with_(HERE, NCCL_NET="socket"), THERE, ["problem", "NCCL_NET=Socket on a"]),
        (
            SOCKETS,
            HERE,
            with_(THERE, NCCL_IB_HCA="mlx5_9"),
            ["problem", "mlx5_9 on b names none of mlx5_0:1"],
        ),
        (SOCKETS, HERE, with_(THERE, NCCL_IB_HCA="^mlx5_0"), ["problem", "names none of mlx5_0:1"]),
        (SOCKETS, HERE, with_(THERE, NCCL_IB_HCA="=mlx5"), ["problem", "names none of mlx5_0:1"]),
        (
            SOCKETS,
            with_(HERE, NCCL_IB_HCA="mlx5"),
            with_(THERE, NCCL_IB_HCA="=mlx5_0:1"),
            ["problem", "both have RDMA devices (NCCL_IB_HCA set", "/dev/infiniband", "EFA needs a plugin"],
        ),
        (SOCKETS, HERE, WITHOUT_CARDS, ["hint", "no active RDMA device on b"]),
        (SOCKETS, HERE, SAME_HOST, ["hint", "two ranks of one host", "/dev/shm"]),
    ],
)
def test_sockets_are_explained(log, here, there, parts):
    said = "\n".join(map(str, advise_nccl(picked_by_nccl(log), here, there)))
    assert bool(said) == bool(parts)
    for part in parts:
        assert part in said


def test_every_library_that_ucx_needs_is_in_nixls_wheel_or_is_looked_for():
    """A module of UCX that lacks a library is left out, and nobody says so."""
    package = next(
        spec for name in ("nixl_cu13", "nixl_cu12") if (spec := importlib.util.find_spec(name)) is not None
    )
    folder = Path(str(package.origin)).parents[1] / f"{package.name}.libs"
    needed = {
        name.decode()
        for module in (folder / "ucx").glob("libuct_*.so*")
        for name in re.findall(rb"\0(lib[\w.+-]+\.so[.\d]*)(?=\0)", module.read_bytes())
    }
    carried = {path.name for path in folder.rglob("*.so*")}
    own = {name.split(".so")[0].split("-")[0] for name in carried}
    absent = {name for name in needed if name not in carried and name.split(".so")[0] not in own}
    absent -= {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
    absent -= {"libflexio.so", "libflexio-al-cp.so"}  # of a kind of network card that runs programs
    assert absent == {"libcuda.so.1", "libnvidia-ml.so.1", "libefa.so.1"}
    assert absent <= set(PACKAGES)


def test_a_library_loads_or_its_package_is_named():
    there, missing = libraries(["libc.so.6", "libefa.so.1"])[0], Library("libefa.so.1", False)
    assert str(there) == "libc.so.6 loads"
    assert str(missing) == "libefa.so.1 is missing (ibverbs-providers)"


def test_without_a_gpu_one_line_says_what_is_missing():
    command = [sys.executable, "-m", "twinfang", "check-network", "--nccl", "--listen", "--device", "cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert "--nccl sums memory of a GPU on each side, and --device cpu has none; libraries: " in line
    assert all(name in line for name in PACKAGES)


TWO_RANKS = """
import sys
from pathlib import Path
import torch
from engine.group.store import GroupStore
from twinfang.network import nccl_check

nccl_check.LARGE_BYTES = 1 << 20
rank, address, log = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
device = torch.device("cpu")
store = GroupStore(address).open(is_first=rank == 0, timeout_s=60)
here = nccl_check.rank_facts({"NCCL_NET": f"of-rank-{rank}"}, device, nccl_check.libraries(["libc.so.6"]))
print(nccl_check.describe(nccl_check.check(store, rank, device, here, log)))
"""


@pytest.mark.exhaustive
def test_two_ranks_measure_their_sums_and_know_of_each_other(tmp_path):
    """On CPUs the sums are gloo's, so the log is a recorded one of NCCL."""
    log = tmp_path / "nccl.log"
    log.write_text(SOCKETS)
    arguments = [f"127.0.0.1:{free_ports(1)[0]}", str(log)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS, str(rank), *arguments], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        said, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
        here, there, transport, bandwidth, latency, *advice = said.splitlines()
        assert here.endswith(f"NCCL_NET=of-rank-{rank}")
        assert there.endswith(f"NCCL_NET=of-rank-{1 - rank}")
        assert transport == "transport  sockets (NET/Socket/0)"
        assert "GB/s, sums of 1 MB" in bandwidth
        assert "µs a sum of 16 KB" in latency
        assert advice[0] == "hint: sockets between two ranks of one host"
