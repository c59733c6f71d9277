"""The scheduler's plan for one step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from engine.files.start_files import NO_JOBS, FileJobs
from engine.memory.cached_start import NO_COPIES, HostCopies
from engine.request import Request
from engine.row_kinds import PlannedRow


@dataclass(frozen=True)
class Swap:
    """Blocks and state of one request on their way to host memory or back."""

    request_id: str
    block_ids: tuple[int, ...]
    slot: int
    row: int = -1
    """The request's row when the plan was made."""


@dataclass(frozen=True)
class Fork:
    """Memory of a computed prompt, from which its forks start (:mod:`engine.schedule.forks`)."""

    source: Swap
    """Blocks and state of the request that has computed the prompt."""
    copies: list[Swap]
    """Blocks and slot of each fork that has room, which get copies: the state and the last blocks of the
    source. The fork shares the other blocks."""
    stored: list[str]
    """Ids of the forks that have no room yet and begin as preempted requests."""


@dataclass(frozen=True)
class StepPlan:
    """The work of one step; each part may be empty. First comes what leaves the pools (swaps out, demotions),
    then forks, then what comes back (swaps in, promotions), then rows."""

    decode_rows: list[PlannedRow]
    prefill_rows: list[PlannedRow]
    admitted: list[Request] = field(default_factory=list)
    """Requests that own a row, blocks and a slot since this step; resumed requests are included."""
    left_rows: list[int] = field(default_factory=list)
    """Rows that were given up since the last step. Their contents must not be read any more."""
    swap_out: list[Swap] = field(default_factory=list)
    swap_in: list[Swap] = field(default_factory=list)
    prefilled: list[Request] = field(default_factory=list)
    """Requests that are only prefilled and found their whole prompt in a cache, here or on another server."""
    forks: list[Fork] = field(default_factory=list)
    is_short_of_blocks: bool = False
    """Whether requests are swapped out because blocks ran out."""
    restless_rows: list[PlannedRow] | None = None
    """The decode rows that may have new blocks, a boundary, a grammar or no sample. The other decode rows are
    *calm*: nothing about them has changed except their number of tokens. None: any row may be restless."""
    host_copies: HostCopies = NO_COPIES
    """Cached prefixes on their way to host memory and back."""
    file_jobs: FileJobs = NO_JOBS
    """Cached prefixes on their way from host memory to files and back."""

    @property
    def rows(self) -> list[PlannedRow]:
        """All rows: decode rows first, then prefill rows."""
        return self.decode_rows + self.prefill_rows

    @property
    def eventful_rows(self) -> list[PlannedRow]:
        """The rows that need a closer look: restless decode rows, then prefill rows."""
        restless = self.decode_rows if self.restless_rows is None else self.restless_rows
        return restless + self.prefill_rows

    def without(self, requests: Collection[Request]) -> StepPlan:
        """Return the plan without the rows of ``requests``, and without those of them that are prefilled."""
        decode_rows, prefill_rows = (
            [row for row in part if row.request not in requests]
            for part in (self.decode_rows, self.prefill_rows)
        )
        prefilled = [request for request in self.prefilled if request not in requests]
        return replace(
            self,
            decode_rows=decode_rows,
            prefill_rows=prefill_rows,
            prefilled=prefilled,
            restless_rows=None,
        )

    @property
    def to_transfer(self) -> list[Request]:
        """Admitted requests whose blocks and slot wait to be filled from a prefill server."""
        return [r for r in self.admitted if r.ticket is not None and r.num_computed == 0]

    @property
    def is_empty(self) -> bool:
        return not self.decode_rows and not self.prefill_rows
