"""How tensor-parallel ranks exchange tensors."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Transport(Protocol):
    """Exchanges tensors of one shape and dtype. All ranks make the same calls in the same order."""

    is_recorded: bool
    """Whether sums and gathers of float32 are calls of CPU kernels, so that they can be recorded
    (:mod:`kernels.cpu.graph`)."""

    def sum(self, x: Tensor) -> None:
        """Add up the ranks' ``x`` in place. Every rank gets the same bits."""

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """Concatenate each rank's ``[n, c]`` to ``[n, size * c]``, and return the first ``width`` columns."""

    def in_rank_order(self) -> Transport:
        """Return a transport whose sums are added in an order that does not depend on the batch."""

    def check(self) -> None:
        """Raise :class:`wire.errors.GroupLostError` if the last results are undefined: a rank is gone."""


class Alone:
    """The transport of a single rank, which has nothing to exchange."""

    is_recorded = True

    def sum(self, x: Tensor) -> None:
        """Do nothing."""

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """See :meth:`Transport.gather_columns`."""
        return x[:, :width]

    def in_rank_order(self) -> Alone:
        """Return this transport: it adds nothing."""
        return self

    def check(self) -> None:
        """Do nothing."""


NO_TRANSPORT = Alone()
