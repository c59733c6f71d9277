"""Threads stand for ranks: the memory is shared in the same way, and kernels run without Python's lock."""

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kernels.collectives.rank_memory import RankMemory
from kernels.cpu.graph import CpuGraph
from testing.conditions import PROMPT_S

SLOT = 2**16


def ranks_of(size, limit_s=PROMPT_S):
    memory = np.zeros(RankMemory.num_bytes(size), dtype=np.uint8)
    fds = [os.pidfd_open(os.getpid())] * (size - 1)
    return [RankMemory(rank, memory, fds, limit_s=limit_s) for rank in range(size)]


def on_all(run, ranks):
    """Call ``run(rank's number, its memory)`` for all ranks at the same time; return their results."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks)), ranks))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 15, 768, SLOT, 2 * SLOT + 5])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(size, count):
    generator = torch.Generator().manual_seed(count)
    rounds = torch.randn(5, size, count, generator=generator) * 10.0 ** torch.arange(size)[:, None]

    def run(rank, memory):
        totals = [parts[rank].clone() for parts in rounds]
        for total in totals:
            memory.sum(total)
        return totals

    expected = [functools.reduce(torch.add, parts) for parts in rounds]
    for totals in on_all(run, ranks_of(size)):
        assert all(torch.equal(total, one) for total, one in zip(totals, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 3), (5, 7, 19), (3, SLOT, 2 * SLOT + 9)])
def test_columns_are_gathered_up_to_a_width(dtype, rows, columns, width):
    parts = [(torch.randn(rows, columns) * 2**20).to(dtype) for _ in range(3)]
    found = on_all(lambda rank, memory: memory.gather_columns(parts[rank], width), ranks_of(3))
    assert all(torch.equal(one, torch.cat(parts, dim=1)[:, :width]) for one in found)


def test_recorded_sums_exchange_new_values_at_every_replay():
    tensors = [torch.ones(768) for _ in range(2)]

    def run(rank, memory):
        graph = CpuGraph()
        with graph.record():
            memory.sum(tensors[rank])
        for _ in range(100):
            tensors[rank].fill_(rank + 1)
            graph.replay()
        return memory.loss()

    assert on_all(run, ranks_of(2)) == [None, None]
    assert all((tensor == 3).all() for tensor in tensors)


def test_waits_are_counted_by_rank():
    ranks = ranks_of(2)
    on_all(lambda rank, memory: memory.sum(torch.zeros(8)), ranks)
    assert all(memory.waited_s(rank) > 0 for memory in ranks for rank in range(2))


def test_a_rank_that_does_not_answer_in_time_loses_the_exchange():
    first, _ = ranks_of(2, limit_s=0.02)
    first.sum(torch.zeros(8))
    assert first.loss() == "another rank has not answered for 0.02 s"
    first.gather_columns(torch.zeros(3, 3), 6)  # returns at once


def test_a_rank_that_ends_loses_the_exchange_at_once():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        memory = np.zeros(RankMemory.num_bytes(2), dtype=np.uint8)
        first = RankMemory(0, memory, [os.pidfd_open(other.pid)], limit_s=10 * PROMPT_S)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(first.sum, torch.zeros(8))
            other.kill()
            waiting.result(timeout=PROMPT_S)
    assert first.loss() == "another rank has ended"


def test_what_a_rank_posted_before_it_ended_counts():
    first, second = ranks_of(2, limit_s=0.02)
    second.sum(torch.ones(8))  # posts, and then waits in vain
    total = torch.ones(8)
    first.sum(total)
    assert (first.loss(), second.loss() is None) == (None, False)
    assert (total == 2).all()
