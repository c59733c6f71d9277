"""Expert parallelism: each rank has some whole routed experts, and tokens travel to the experts and back.

A MoE layer's tokens are dispatched, computed on the ranks that have their experts, and combined at *home*,
which is the rank that dispatched them.

    dispatch   all-gather     hidden state and expert ids of each token, once to each rank
    compute    the pairs (token, expert) of all ranks' tokens whose expert is on this rank
    combine    all-to-all     one result for each pair; gate weights and the sum are computed at home

The ``G`` ranks are all processes of a group: ``D`` data-parallel ranks of ``T`` tensor-parallel ranks each.
The tensor-parallel ranks of one server have the same tokens, so each rank dispatches its share of them. In a
rank's summand, the tokens that other ranks dispatched are zero.

No token is dropped and no shape depends on the router's choice. For a step of ``n`` tokens with ``k`` experts
each, every rank has room for ``C = ceil(n / T)`` tokens from each rank, and for
``m = min(k, experts on this rank)`` results of each token.
So the host never waits and a step can be captured as a graph. An all-to-all in place of the all-gather would
also need room for every token of every rank. So it would carry as many bytes to each rank, and it would first
need ``G`` copies of the tokens.

Each result is sent by itself, and home sums results in the router's order. If a rank has several of a token's
experts, sending their partial sum would take fewer bytes but change the order of the sum. Here the result has
the same bits as on a single rank, for any number of ranks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from wire.errors import ConfigError, GroupLostError

MOST_TOKENS = 512
"""Maximum number of tokens that one rank dispatches at a time. Buffers have room for this number of tokens
from each rank."""
_ALIGNMENT = 16
_NO_EXPERT = -1
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch 2.13 renamed this function."""


class Experts(Protocol):
    """The experts of this rank."""

    def pairs(self, x: Tensor, expert_ids: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        """Compute the outputs ``[t, num_slots, size]`` of this rank's experts for ``t`` tokens.

        Slot ``slots[i, j]`` of row i is the output of expert ``expert_ids[i, j]`` for ``x[i]``.

        x ``[t, size]``, ids and slots ``[t, k]`` int64. Ids count this rank's experts from 0. A pair whose
        expert is on another rank has slot ``num_slots`` and any id. Slots without a pair are undefined.
        """

    def combine(self, results: Tensor, places: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute ``sum_j weights[i, j] results[places[i, j]]``, with the same bits as on a single rank.

        results ``[p, size]``, places ``[n, k]`` int64, weights ``[n, k]`` float32; the sum is ``[n, size]``.
        """


class ExpertParallel:
    """This process's place among the ranks that share the experts."""

    def __init__(self, rank: int = 0, size: int = 1, *, tp_rank: int = 0, tp_size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._padded_to: int | None = None

    def share(self, num_experts: int) -> range:
        """Return the experts on this rank. Raises :class:`ConfigError` if they can't be divided evenly."""
        check_shares(num_experts, self.size)
        each = num_experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def pad_to(self, num_tokens: int | None) -> None:
        """Set the maximum number of tokens that a rank has in the next passes.

        None: all ranks have as many tokens as this rank.
        """
        self._padded_to = num_tokens

    def run(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: Experts, num_experts: int
    ) -> Tensor:
        """Return this rank's summand of ``sum_j weight_j expert_j(x)``, ``[n, size]``.

        x ``[n, size]``, ids ``[n, k]`` int64 among all ``num_experts``, weights ``[n, k]`` float32. All ranks
        call this at the same time. Raises :class:`GroupLostError` if a rank is gone.
        """
        num_tokens = len(x)
        each = -(-num_tokens // self._tp_size)
        own = slice(min(self._tp_rank * each, num_tokens), min((self._tp_rank + 1) * each, num_tokens))
        room = max(each, -(-(self._padded_to or 0) // self._tp_size))
        out = torch.zeros_like(x) if self._tp_size > 1 else torch.empty_like(x)
        for first in range(0, room, MOST_TOKENS):
            rows = slice(min(own.start + first, own.stop), min(own.start + first + MOST_TOKENS, own.stop))
            part = _Part(
                self, x[rows], expert_ids[rows], experts, num_experts, min(MOST_TOKENS, room - first)
            )
            results, places = part.exchange()
            if rows.stop > rows.start:
                out[rows] = experts.combine(results, places, expert_weights[rows])
        return out


class _Part:
    """The tokens of a pass that are dispatched together, at most :data:`MOST_TOKENS`."""

    def __init__(
        self,
        group: ExpertParallel,
        x: Tensor,
        expert_ids: Tensor,
        experts: Experts,
        num_experts: int,
        room: int,
    ) -> None:
        self.group = group
        self.x = x
        self.expert_ids = expert_ids
        self.experts = experts
        self.room = room
        self.num_local = num_experts // group.size
        self.num_slots = min(expert_ids.shape[1], self.num_local)

    def exchange(self) -> tuple[Tensor, Tensor]:
        """Return results ``[G * C * m, size]`` and the place of each pair's result, ``[n, k]`` int64."""
        x, expert_ids = self._dispatch()
        local = expert_ids - self.group.rank * self.num_local
        is_here = (local >= 0) & (local < self.num_local)
        slots = torch.where(is_here, is_here.cumsum(1) - 1, self.num_slots)
        results = self.experts.pairs(x, local.clamp(0, self.num_local - 1), slots, self.num_slots)
        returned = torch.empty_like(results)
        _collect(dist.all_to_all_single, _as_bytes(returned), _as_bytes(results))
        return returned.view(-1, results.shape[-1]), self._places()

    def _dispatch(self) -> tuple[Tensor, Tensor]:
        """Return all ranks' tokens ``[G * C, size]`` and expert ids ``[G * C, k]``, -1 if there is no token.

        One message holds both: a row is a hidden state followed by int32 ids.
        """
        num_tokens, k = self.expert_ids.shape
        hidden_bytes = self.x.shape[1] * self.x.element_size()
        ids_from = _aligned(hidden_bytes)
        row_bytes = _aligned(ids_from + 4 * k)
        sent = torch.empty((self.room, row_bytes), dtype=torch.uint8, device=self.x.device)
        sent[:num_tokens, :hidden_bytes].view(self.x.dtype).copy_(self.x)
        ids = sent[:, ids_from : ids_from + 4 * k].view(torch.int32)
        ids[:num_tokens].copy_(self.expert_ids)
        ids[num_tokens:].fill_(_NO_EXPERT)
        came = torch.empty((self.group.size * self.room, row_bytes), dtype=torch.uint8, device=self.x.device)
        _collect(_all_gather, came, sent)
        ids = came[:, ids_from : ids_from + 4 * k].view(torch.int32)
        return came[:, :hidden_bytes].view(self.x.dtype), ids.to(torch.int64)

    def _places(self) -> Tensor:
        """Return the place of each pair's result.

        Rank ``g`` sends back ``[C, m]`` results. They keep the order of each token's pairs.
        """
        owners = self.expert_ids // self.num_local
        is_same = owners[:, :, None] == owners[:, None, :]
        slots = is_same.tril(-1).sum(-1)
        tokens = torch.arange(len(owners), device=owners.device)[:, None]
        return (owners * self.room + tokens) * self.num_slots + slots


NO_EXPERT_PARALLEL = ExpertParallel()
"""All experts are on this rank."""


def check_shares(num_experts: int, num_ranks: int) -> None:
    """Raise :class:`ConfigError` if the experts can't be divided evenly among ``num_ranks`` ranks."""
    if num_experts % num_ranks:
        raise ConfigError(
            f"`expert_parallel`: the checkpoint's {num_experts} experts can't be divided among "
            f"{num_ranks} ranks (`data_parallel.size` x `tensor_parallel`); choose a number that divides them"
        )


def _collect(collective: Any, output: Tensor, given: Tensor) -> None:
    try:
        collective(output, given)
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise GroupLostError(f"a collective of the group's ranks failed: {reason}") from error


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
