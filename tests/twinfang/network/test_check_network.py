"""What is picked out of UCX's log, what is advised, and the command itself between two processes."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from twinfang.network.gpu_advice import advise_gpus
from twinfang.network.gpu_facts import GpuFacts, gpu_facts
from twinfang.network.ucx_advice import advise, allows, needed_transport_advice
from twinfang.network.ucx_transport import Device, HostFacts, Transport, errors, host_facts, picked_transport
from twinfang.stack.ports import free_ports

TIMEOUT_S = 120

HEADER = "[1795291891.144100] [vm:31125:0]   "
LOG = "\n".join(
    HEADER + line
    for line in (
        "| sink self cfg#0                                                  |",
        "| remote memory read by ucp_get*(multi) into host memory from host |",
        "| 0..inf | zero-copy          | xpmem/memory                       |",
        "| sink {where} cfg#1                                               |",
        "| remote memory write by ucp_put*(multi) from host memory to host  |",
        "| 0..inf | zero-copy          | cma/memory                         |",
        "| sink {where} cfg#1                                               |",
        "| remote memory read by ucp_get*(multi) into host memory from host |",
        "+--------+--------------------+------------------------------------+",
        "| Range  |    Description     |               Config               |",
        "+--------+--------------------+------------------------------------+",
        "| 0..64  | short              | tcp/lo                             |",
        "| 65..inf | {method} | {config} |",
    )
)


@pytest.mark.parametrize(
    ("method", "config", "kind", "lanes"),
    [
        ("zero-copy", "cma/memory", "shared memory", (("cma", "memory"),)),
        ("software emulation", "tcp/eth0", "TCP", (("tcp", "eth0"),)),
        ("zero-copy", "rc_mlx5/mlx5_0:1", "RDMA", (("rc_mlx5", "mlx5_0:1"),)),
        (
            "zero-copy",
            "50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1",
            "RDMA",
            (("rc_mlx5", "mlx5_0:1"), ("rc_mlx5", "mlx5_1:1")),
        ),
        ("zero-copy", "52% on tcp/lo and 48% on cma/memory", "TCP", (("tcp", "lo"), ("cma", "memory"))),
        ("zero-copy", "cuda_ipc/cuda", "GPU", (("cuda_ipc", "cuda"),)),
        ("zero-copy", "carrier_pigeon/0", "unknown", (("carrier_pigeon", "0"),)),
    ],
)
def test_the_transport_of_large_reads_from_the_peer_is_found(method, config, kind, lanes):
    transport = picked_transport(LOG.format(where="inter-node", method=method, config=config), "DRAM")
    assert transport == Transport(kind, lanes, method)
    assert transport.names in str(transport)
    assert transport.needs_the_peer == (method == "software emulation")


def test_a_log_without_the_table_tells_nothing():
    assert picked_transport("", "DRAM") is None
    assert picked_transport("\n".join(LOG.splitlines()[:6]), "DRAM") is None


@pytest.mark.parametrize("gpu_is_first", [True, False])
def test_blocks_in_gpu_memory_and_epochs_in_host_memory_have_tables_of_their_own(gpu_is_first):
    host = LOG.format(where="intra-node", method="software emulation", config="tcp/lo")
    gpu = LOG.format(where="intra-node", method="zero-copy", config="cuda_ipc/cuda")
    gpu = gpu.replace("into host memory from host", "into cuda/GPU0 from cuda/dev[1]")
    log = "\n".join((gpu, host) if gpu_is_first else (host, gpu))
    for memory, kind in (("VRAM", "GPU"), ("DRAM", "TCP")):
        transport = picked_transport(log, memory)
        assert transport is not None
        assert transport.kind == kind
    assert picked_transport(host, "VRAM") is None


def test_ucx_s_errors_are_found_once_each():
    line = "[1.2] [vm:1:0]  select.c:722  UCX  ERROR   no active messages transport to <no debug data>"
    assert errors(f"{line}\n{line}\n") == ["no active messages transport to <no debug data>"]


PORT = Device("mlx5_0:1", True, 200.0)
ETH = Device("eth0", True, 25.0)
HERE = HostFacts("a", "boot-a", "pid:[1]", 0, (PORT,), (ETH,), ())
THERE = dataclasses.replace(HERE, hostname="b", boot_id="boot-b")
TCP = Transport("TCP", (("tcp", "eth0"),), "software emulation")
RDMA = Transport("RDMA", (("rc_mlx5", "mlx5_0:1"),), "zero-copy")


def with_(host: HostFacts, **variables: str) -> HostFacts:
    return dataclasses.replace(host, variables=tuple(variables.items()))


def advice(transport: Transport, here: HostFacts, there: HostFacts, gb_per_s: float = 2.5) -> str:
    return "\n".join(map(str, advise(transport, here, there, gb_per_s=gb_per_s)))


def test_rdma_at_its_rate_needs_nothing():
    assert advice(RDMA, HERE, THERE, 22.0) == ""


@pytest.mark.parametrize(
    ("here", "there", "parts"),
    [
        (HERE, THERE, ["problem: TCP", "both have RDMA", "UCX_NET_DEVICES=mlx5_0:1 on a", "UCX_TLS=rc"]),
        (
            with_(HERE, UCX_TLS="tcp"),
            with_(THERE, UCX_TLS="tcp"),
            ["problem", "UCX_TLS=tcp on a", "unset UCX_TLS"],
        ),
        (
            HERE,
            with_(THERE, UCX_TLS="tcp,cuda"),
            ["UCX_TLS=tcp,cuda on b", "not set here and tcp,cuda there"],
        ),
        (
            with_(HERE, UCX_NET_DEVICES="eth0"),
            THERE,
            ["UCX_NET_DEVICES=eth0 on a", "UCX_NET_DEVICES=mlx5_0:1"],
        ),
        (with_(HERE, UCX_NET_DEVICES="mlx5_7:1"), THERE, ["mlx5_7:1, which does not exist", "mlx5_0:1"]),
        (HERE, dataclasses.replace(THERE, rdma=()), ["hint", "b shows no active RDMA"]),
        (dataclasses.replace(HERE, rdma=()), dataclasses.replace(THERE, rdma=()), ["hint", "neither host"]),
    ],
)
def test_tcp_between_hosts_is_explained(here, there, parts):
    text = advice(TCP, here, there)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("here", "there", "parts"),
    [
        (with_(HERE, UCX_TLS="^cma"), HERE, ["UCX_TLS=^cma leaves out cma", "unset UCX_TLS"]),
        (HERE, dataclasses.replace(HERE, pid_namespace="pid:[2]"), ["containers", "shareProcessNamespace"]),
        (dataclasses.replace(HERE, ptrace_scope=1), HERE, ["SYS_PTRACE", "ptrace_scope=0"]),
    ],
)
def test_tcp_on_one_host_is_explained(here, there, parts):
    text = advice(TCP, here, there)
    for part in parts:
        assert part in text


def test_a_slower_device_than_the_best_is_a_problem():
    slow = dataclasses.replace(HERE, network=(ETH, Device("eth1", True, 100.0)), rdma=())
    assert "UCX_NET_DEVICES=eth1" in advice(TCP, slow, dataclasses.replace(THERE, rdma=()))


def test_a_link_that_is_far_from_its_rate_is_a_hint():
    assert "hint: 2.50 GB/s over 25.00 GB/s" in advice(RDMA, HERE, THERE, 2.5)


def test_ports_that_carry_nothing_are_a_hint():
    ports = tuple(Device(f"mlx5_{i}:1", True, 400.0) for i in range(4))
    here = dataclasses.replace(HERE, rdma=(*ports, Device("mlx5_9:1", True, 100.0)))
    two = Transport("RDMA", tuple(("rc_mlx5", port.name) for port in ports[:2]), "zero-copy")
    text = advice(two, here, THERE, 90.0)
    assert "hint: 2 of 4 active RDMA ports of a" in text
    assert "UCX_MAX_RMA_RAILS=4 and UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1" in text
    four = dataclasses.replace(two, lanes=tuple(("rc_mlx5", port.name) for port in ports))
    assert advice(four, here, THERE, 180.0) == ""


# --- GPUs --------------------------------------------------------------------------------------------

GPU_0 = GpuFacts("H100", "uuid-0", ("uuid-0", "uuid-1"), 200)
GPU_1 = dataclasses.replace(GPU_0, uuid="uuid-1")
WITH_GPU = dataclasses.replace(HERE, gpu=GPU_0)
BESIDE = dataclasses.replace(HERE, gpu=GPU_1)
CUDA_IPC = Transport("GPU", (("cuda_ipc", "cuda"),), "zero-copy")
TCP_LO = Transport("TCP", (("tcp", "lo"),), "software emulation")


def gpu_advice(transport: Transport, here: HostFacts, there: HostFacts) -> str:
    return "\n".join(map(str, advise_gpus(transport, here, there)))


def test_gpus_of_one_host_over_cuda_ipc_need_nothing():
    assert gpu_advice(CUDA_IPC, WITH_GPU, BESIDE) == ""
    assert gpu_advice(TCP_LO, HERE, HERE) == "", "sides in host memory are advised on CMA"


@pytest.mark.parametrize(
    ("here", "there", "parts"),
    [
        (
            with_(WITH_GPU, UCX_TLS="tcp,sm"),
            BESIDE,
            ["problem", "UCX_TLS=tcp,sm on a leaves it out", "add cuda to UCX_TLS"],
        ),
        (
            WITH_GPU,
            dataclasses.replace(BESIDE, pid_namespace="pid:[2]"),
            ["problem", "different PID namespaces", "--pid=container:NAME", "shareProcessNamespace"],
        ),
        (
            dataclasses.replace(WITH_GPU, gpu=dataclasses.replace(GPU_0, visible=("uuid-0",))),
            BESIDE,
            ["problem", "a does not see the other side's GPU uuid-1", "CUDA_VISIBLE_DEVICES"],
        ),
        (
            with_(WITH_GPU, UCX_CUDA_IPC_ENABLE_GET_ZCOPY="auto"),
            BESIDE,
            ["problem", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=auto on a", "without NVLink", "unset it"],
        ),
        (WITH_GPU, BESIDE, ["hint", "UCX_LOG_LEVEL=debug"]),
    ],
)
def test_gpus_of_one_host_over_tcp_are_explained(here, there, parts):
    """As vllm-project/vllm 55906 and 52607 had to be."""
    text = gpu_advice(TCP_LO, here, there)
    for part in parts:
        assert part in text
    assert "CMA" not in advice(TCP_LO, here, there), "the kernel can't copy GPU memory"


def test_a_network_card_between_gpus_of_one_host_is_slower_but_no_problem():
    text = gpu_advice(RDMA, WITH_GPU, dataclasses.replace(BESIDE, pid_namespace="pid:[2]"))
    assert "hint: GPU memory of one host is read by rc_mlx5" in text
    assert "problem" not in text


@pytest.mark.parametrize(
    ("ordering", "parts"),
    [
        (0, ["problem", "GPUDirectRDMAWritesOrdering is none", "UCX_IB_GPU_DIRECT_RDMA=n on a"]),
        (None, ["hint", "did not say", "GPUDirectRDMAWritesOrdering"]),
        (100, []),
        (200, []),
    ],
)
def test_a_gpu_that_does_not_order_a_network_card_s_writes_is_named(ordering, parts):
    here = dataclasses.replace(WITH_GPU, gpu=dataclasses.replace(GPU_0, writes_ordering=ordering))
    text = gpu_advice(RDMA, here, dataclasses.replace(THERE, gpu=GPU_1))
    for part in parts:
        assert part in text
    assert bool(text) == bool(parts)


@pytest.mark.parametrize(("result", "ordering"), [(0, 100), (1, None)])
def test_a_gpu_is_described_by_torch_and_by_cuda_s_driver(monkeypatch, result, ordering):
    def device_get(device, index):
        device._obj.value = 40 + index
        return 0

    def get_attribute(value, attribute, device):
        assert (attribute, device.value) == (118, 41)
        value._obj.value = 100
        return result

    driver = SimpleNamespace(cuDeviceGet=device_get, cuDeviceGetAttribute=get_attribute)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus = [SimpleNamespace(name=f"H100-{i}", uuid=f"uuid-{i}") for i in range(2)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    facts = gpu_facts(torch.device("cuda:1"))
    assert facts == GpuFacts("H100-1", "uuid-1", ("uuid-0", "uuid-1"), ordering)
    assert ("for: itself" if ordering else "for: unknown") in str(facts)
    assert gpu_facts(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("tls", "transport", "allowed"),
    [
        (None, "tcp", True),
        ("all", "rc", True),
        ("tcp", "cma", False),
        ("sm,tcp", "cma", True),
        ("rc_x,sm", "rc_x", True),
        ("rc", "rc_mlx5", True),
        ("^cma", "cma", False),
        ("^cma", "tcp", True),
        ("^sm", "cma", False),
    ],
)
def test_ucx_tls_is_read_as_ucx_reads_it(tls, transport, allowed):
    assert allows(tls, transport) == allowed


def test_a_ucx_tls_without_a_transport_for_messages_is_named():
    found = needed_transport_advice(with_(HERE, UCX_TLS="cma,sm"))
    assert found is not None
    assert "set UCX_TLS=cma,sm,tcp" in str(found)
    assert needed_transport_advice(with_(HERE, UCX_TLS="rc,sm")) is None
    assert needed_transport_advice(HERE) is None


def test_a_host_s_devices_are_read_from_its_files(tmp_path: Path):
    for path, text in {
        "proc/sys/kernel/hostname": "node-7\n",
        "proc/sys/kernel/random/boot_id": "b\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "sys/class/net/lo/operstate": "unknown\n",
        "sys/class/net/eth0/operstate": "up\n",
        "sys/class/net/eth0/speed": "25000\n",
        "sys/class/net/eth1/operstate": "down\n",
        "sys/class/net/eth1/speed": "-1\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    facts = host_facts({"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "info", "HOME": "/"}, root=tmp_path)
    assert facts == HostFacts(
        "node-7",
        "b",
        "",
        0,
        (Device("mlx5_0:1", True, 200.0), Device("mlx5_1:1", False, None)),
        (Device("eth0", True, 25.0), Device("eth1", False, None)),
        (("UCX_TLS", "tcp"),),
    )


# --- the command, over real NIXL --------------------------------------------------------------------


def environment(tls: str) -> dict[str, str]:
    return os.environ | {"UCX_TLS": tls, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def listening() -> Iterator[str]:
    """Address of a side that listens, TCP alone."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "twinfang", "check-network", "--listen", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment("tcp")) as process:
        try:
            assert process.stdout is not None
            assert f"127.0.0.1:{port}" in process.stdout.readline()
            yield f"127.0.0.1:{port}"
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()


def check_network(*arguments: str, tls: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "twinfang", "check-network", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(tls),
        check=False,
    )


def test_two_processes_over_tcp_are_measured_and_told_what_is_better(listening: str):
    ran = check_network(listening, "--json", tls="tcp")
    assert ran.returncode == 1, ran.stderr
    report = json.loads(ran.stdout)
    assert report["transport"]["kind"] == "TCP"
    assert report["transport"]["method"] == "software emulation"
    assert report["large_bytes"] > 64 << 20
    assert report["gb_per_s"] > 0
    assert report["latency_us"] > 0
    assert report["advice"][0]["remedy"] == "unset UCX_TLS"
    assert "the report above says what to set" in ran.stderr


def test_a_ucx_tls_with_which_nixl_can_t_start_is_explained():
    ran = check_network("127.0.0.1:1", tls="posix,sysv,self")
    assert ran.returncode == 1
    assert "set UCX_TLS=posix,sysv,self,tcp" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.exhaustive
def test_both_sides_or_none_is_one_line():
    for arguments in ((), ("--listen", "--peer", "a:1")):
        ran = check_network(*arguments, tls="tcp")
        assert ran.returncode == 2
        assert "--listen on one side" in ran.stderr


@pytest.mark.exhaustive
def test_a_side_that_does_not_answer_is_one_line():
    ran = check_network(f"127.0.0.1:{free_ports(1)[0]}", tls="tcp")
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr


@pytest.mark.exhaustive
def test_a_handoff_is_benchmarked_beside_a_raw_read_and_a_copy():
    command = ["bench", "transfer", "--prompt-len", "16", "--prompt-len", "64", "--rounds", "3", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "twinfang", *command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["handoffs"]
    assert [row["prompt_len"] for row in rows] == [16, 64]
    for row in rows:
        assert row["num_descriptors"] == 2
        assert min(row["num_bytes"], row["copy_us"], row["raw_us"], row["handoff_us"]) > 0
