"""Pools for transfers: a range of shapes, and bytes that identify their unit."""

from __future__ import annotations

import dataclasses
import math
import os

import torch

from engine.memory.caches import Caches, CacheSpec
from kv_transfer.handshake import with_digest
from wire.messages.handoff import HandshakeReply

SPEC = CacheSpec(
    attn_layers=2,
    kv_heads=4,
    head_dim=16,
    kv_dtype=torch.float32,
    mamba_layers=3,
    conv_channels=12,
    conv_width=4,
    mamba_heads=2,
    mamba_head_dim=8,
    state_size=16,
    conv_dtype=torch.float32,
    ssm_dtype=torch.float32,
)
BLOCK_SIZE = 8

POISON = 0xA5
"""The content of a destination before a transfer. It shows bytes that changed although no transfer named
them."""


@dataclasses.dataclass(frozen=True)
class PoolShape:
    """All parameters that a process needs to make the same pools as another process; picklable."""

    spec: CacheSpec = SPEC
    block_size: int = BLOCK_SIZE
    num_blocks: int = 24
    num_slots: int = 8

    @property
    def last_slot(self) -> int:
        """Highest slot; the null slot if there are no states."""
        return self.num_slots - 1 if self.spec.has_state else 0

    @property
    def most_blocks(self) -> int:
        """Maximum number of blocks of a request."""
        return self.num_blocks - 1 if self.spec.has_kv else 0

    def caches(self) -> Caches:
        return Caches(
            self.spec,
            num_blocks=self.num_blocks,
            num_slots=self.num_slots,
            block_size=self.block_size,
            device="cpu",
        )


def spec_with(**changes: object) -> CacheSpec:
    return dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]


def unit_bytes_of(pool: torch.Tensor) -> torch.Tensor:
    """``[num_units, unit_bytes]`` view of a pool, uint8."""
    return pool.view(pool.shape[0], math.prod(pool.shape[1:])).view(torch.uint8)


def fill(caches: Caches, seed: int) -> None:
    """Fill the pools with random bytes, which any process can make again from the same seed and shape."""
    generator = torch.Generator().manual_seed(seed)
    for pool in (caches.kv, caches.state):
        units = unit_bytes_of(pool)
        units.copy_(torch.randint(0, 256, units.shape, dtype=torch.uint8, generator=generator))


def poison(caches: Caches) -> None:
    for pool in (caches.kv, caches.state):
        unit_bytes_of(pool).fill_(POISON)


def transport_variables(transport: str) -> dict[str, str]:
    """Return UCX's environment for a transport of the tests.

    | name | a READ |
    |---|---|
    | default | whatever UCX picks; between processes that may trace each other that is CMA, which reads the target's memory without it |
    | emulated | through shared memory or TCP: the target takes part, as between containers |
    """  # noqa: E501
    return {} if transport == "default" else {"UCX_TLS": os.environ.get("UCX_TLS", "^cma")}


def with_rank(reply: HandshakeReply, **changes: object) -> HandshakeReply:
    """Return the reply of a server with one rank, with ``changes`` in the description of this rank's memory.

    If the reply has a digest, it is made anew: such a server lies, and nothing was damaged on the way.
    """
    (rank,) = reply.ranks
    changed = dataclasses.replace(reply, ranks=(dataclasses.replace(rank, **changes),))  # type: ignore[arg-type]
    return with_digest(changed) if reply.digest else changed
