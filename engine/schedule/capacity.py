"""Computes numbers of blocks and slots from a memory budget, or raises an error that shows the arithmetic.

No setting is lowered silently. If a batch, a context or a pool does not fit, the operator decides what to
change. So the error names what is missing, and which settings with which values would fit.

| slots | are |
|---|---|
| null | index 0, which padding points at |
| running | ``1 + k`` for every sequence: each of the k drafts of a step keeps a state; 1 if rows *replay* |
| leased | on a prefill server: one more for each sequence, whose state a decode server is to read |
| cached | states that only the prefix cache holds |
| read | the number by which sequences exceed cached slots, so that each sequence can read a cached state |

A running sequence may start its next step from a cached state, which then can't be evicted. If there were no
slot for that state in addition to the running slots, a request whose prefix is cached would have to wait
until another request ends.

Rows that replay keep the inputs of two steps beside the pools (:mod:`kernels.replay.kept_inputs`). These
bytes are a part of the budget.

Memory that a model does not keep takes no bytes and limits nothing. Without recurrent layers the only slot is
the null slot. Without attention layers the only block is the null block, and a sequence of any length has no
blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.memory.caches import CacheSpec
from engine.schedule.cache_modes import CacheModeName
from wire.errors import CapacityError
from wire.messages.handoff import Role

GIB = 1 << 30


@dataclass(frozen=True)
class CapacityPlan:
    """Sizes of both pools, null entries included."""

    num_blocks: int
    num_slots: int
    block_size: int
    block_bytes: int
    slot_bytes: int
    max_model_len: int
    num_speculative: int = 0
    """k: drafts in a step."""
    kept_bytes: int = 0
    """Inputs that decode rows keep; 0: each position has a slot for its state."""

    @property
    def replays(self) -> bool:
        """Whether a decode row has one slot, and repeats the accepted inputs of its last step."""
        return self.kept_bytes > 0

    @property
    def has_kv(self) -> bool:
        return self.block_bytes > 0

    @property
    def has_state(self) -> bool:
        return self.slot_bytes > 0

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the blocks needed for ``num_tokens`` tokens of a sequence; 0 if the model keeps no KV."""
        return blocks_for(num_tokens, self.block_size) if self.has_kv else 0

    @property
    def blocks_per_seq(self) -> int:
        """Blocks of one sequence of ``max_model_len`` tokens."""
        return self.blocks_for(self.max_model_len)

    @property
    def table_columns(self) -> int:
        """Columns of a block table: a row's ``1 + k`` positions may reach k tokens past ``max_model_len``.

        1 without KV; that column stays null.
        """
        return max(1, self.blocks_for(self.max_model_len + self.num_speculative))

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.num_slots * self.slot_bytes + self.kept_bytes

    @property
    def max_held(self) -> int:
        """Maximum number of requests whose memory can be leased at the same time.

        This limit is needed because equal requests share blocks and states: memory alone does not bound how
        many are leased.
        """
        return (self.num_slots if self.has_state else self.num_blocks) - 1

    @property
    def num_tokens(self) -> int | None:
        """Tokens whose KV fits into all blocks but the null one; None: any number."""
        return (self.num_blocks - 1) * self.block_size if self.has_kv else None

    @property
    def num_full_seqs(self) -> int | None:
        """Sequences of ``max_model_len`` tokens whose KV fits at once; None: any number."""
        return (self.num_blocks - 1) // self.blocks_per_seq if self.has_kv else None


@dataclass(frozen=True)
class SlotCount:
    """Number of a server's slots for each purpose."""

    running: int
    leased: int
    cached: int
    read: int
    null: int = 1

    @classmethod
    def none(cls) -> SlotCount:
        """Counts for a model without recurrent layers: only the null slot, of zero bytes."""
        return cls(running=0, leased=0, cached=0, read=0)

    @property
    def total(self) -> int:
        return self.null + self.running + self.leased + self.cached + self.read


def count_slots(
    *,
    role: Role,
    max_num_seqs: int,
    num_speculative: int,
    cache_mode: CacheModeName,
    num_cached_states: int | None,
    replays: bool = False,
) -> SlotCount:
    """Counts the slots with which ``max_num_seqs`` sequences can always run at once.

    ``num_cached_states`` None: twice ``max_num_seqs``; mode ``none`` has no cached states. In mode ``all``
    the states at boundaries that a sequence has passed belong to the prefix cache and can be evicted. So the
    number of slots does not depend on the length of sequences.
    """
    cached = read = 0
    if cache_mode != "none":
        cached = 2 * max_num_seqs if num_cached_states is None else num_cached_states
        read = max(0, max_num_seqs - cached)
    return SlotCount(
        running=max_num_seqs * (1 if replays else 1 + num_speculative),
        leased=max_num_seqs if role == "prefill" else 0,
        cached=cached,
        read=read,
    )


@dataclass(frozen=True)
class Demand:
    """What a server is asked to hold. :meth:`within` turns it into pool sizes for a budget."""

    spec: CacheSpec
    role: Role
    max_model_len: int
    max_num_seqs: int
    block_size: int
    cache_mode: CacheModeName = "none"
    num_cached_states: int | None = None
    num_speculative: int = 0
    """k: drafts in a step."""
    kept_token_bytes: int = 0
    """Bytes that a decode row keeps of a token to replay it; 0: each position has a slot for its state."""

    @property
    def replays(self) -> bool:
        """Whether a decode row has one slot, and repeats the accepted inputs of its last step."""
        return self.kept_token_bytes > 0 and self.num_speculative > 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the inputs of two steps that all rows keep, the null row among them."""
        num_tokens = 2 * (1 + self.num_speculative) * (self.max_num_seqs + 1)
        return num_tokens * self.kept_token_bytes if self.replays else 0

    @property
    def slots(self) -> SlotCount:
        if not self.spec.has_state:
            return SlotCount.none()
        return count_slots(
            role=self.role,
            max_num_seqs=self.max_num_seqs,
            num_speculative=self.num_speculative,
            cache_mode=self.cache_mode,
            num_cached_states=self.num_cached_states,
            replays=self.replays,
        )

    @property
    def slot_bytes(self) -> int:
        return self.spec.slot_bytes

    @property
    def block_bytes(self) -> int:
        return self.spec.block_bytes(self.block_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self.spec.block_bytes(1)

    @property
    def slots_bytes(self) -> int:
        return self.slots.total * self.slot_bytes

    def _blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size) if self.spec.has_kv else 0

    @property
    def blocks_per_seq(self) -> int:
        return self._blocks_for(self.max_model_len)

    @property
    def growth_blocks(self) -> int:
        """Blocks that admission keeps free for each running sequence to grow into.

        A step writes the KV of up to ``1 + k`` tokens, and drafting writes the KV of k more after them.
        """
        return self._blocks_for(1 + 2 * self.num_speculative)

    @property
    def min_blocks_per_seq(self) -> int:
        """Minimum number of blocks per sequence with which ``max_num_seqs`` sequences run at once.

        One block is not enough: each sequence needs room to grow, and a leased sequence of a prefill server
        keeps its blocks.
        """
        return 1 + self.growth_blocks if self.spec.has_kv else 0

    @property
    def min_blocks(self) -> int:
        """The null block, plus the larger of two numbers: the blocks of one full-length sequence, and
        ``min_blocks_per_seq`` for each sequence."""
        return 1 + max(self.blocks_per_seq, self.min_blocks_per_seq * self.max_num_seqs)

    @property
    def max_blocks(self) -> int:
        """Blocks that all sequences at full length can use; more are not allocated."""
        more = max(self.growth_blocks, self.blocks_per_seq if self.role == "prefill" else 0)
        return 1 + (self.blocks_per_seq + more) * self.max_num_seqs

    @property
    def min_bytes(self) -> int:
        """The smallest budget that :meth:`within` accepts."""
        return self.slots_bytes + self.kept_bytes + self.min_blocks * self.block_bytes

    def within(
        self, budget_bytes: int, budget_setting: Callable[[int], str] = "`cache_memory_bytes` {}".format
    ) -> CapacityPlan:
        """Divides a budget between slots, which are counted first, and blocks, which get the rest.

        ``budget_setting`` takes a number of bytes and returns, for the error message, the setting and value
        that give this budget.

        Raises :class:`CapacityError` if the budget is below :attr:`min_bytes`.
        """
        if budget_bytes < self.min_bytes:
            raise CapacityError(self._refusal(budget_bytes, budget_setting))
        num_blocks = self.max_blocks
        if self.block_bytes:
            left = budget_bytes - self.slots_bytes - self.kept_bytes
            num_blocks = min(num_blocks, left // self.block_bytes)
        return CapacityPlan(
            num_blocks,
            self.slots.total,
            self.block_size,
            self.block_bytes,
            self.slot_bytes,
            self.max_model_len,
            self.num_speculative,
            self.kept_bytes,
        )

    def _refusal(self, budget_bytes: int, budget_setting: Callable[[int], str]) -> str:
        needs = [self._slots_text()] if self.spec.has_state else []
        if self.replays:
            needs.append(f"inputs that {self.max_num_seqs} sequences keep = {size_text(self.kept_bytes)}")
        needs += [self._blocks_text()] if self.spec.has_kv else []
        fitting = [budget_setting(self.min_bytes), *self._fitting_settings(budget_bytes)]
        remedy = "; this would fit: " if len(fitting) == 1 else "; each of these would fit: "
        return (
            f"the cache budget of {size_text(budget_bytes)} is too small, {size_text(self.min_bytes)} "
            f"are needed: {', and '.join(needs)}{remedy}{', '.join(fitting)}"
        )

    def _slots_text(self) -> str:
        slots = self.slots
        each = "" if self.replays else f" x (1 + {self.num_speculative})"
        parts = ["1 null", f"{self.max_num_seqs} sequences{each} running"]
        parts += [
            f"{number} {name}"
            for number, name in (
                (slots.leased, "leased"),
                (slots.cached, "cached"),
                (slots.read, "so that each sequence can read a cached state"),
            )
            if number
        ]
        size = f"{size_text(self.slot_bytes)} = {size_text(self.slots_bytes)}"
        return f"{slots.total} state slots ({' + '.join(parts)}) x {size}"

    def _blocks_text(self) -> str:
        if self.blocks_per_seq >= self.min_blocks_per_seq * self.max_num_seqs:
            parts = f"one sequence of {self.max_model_len} tokens at {self.block_size} a block"
        else:
            parts = f"{self.min_blocks_per_seq} for each of {self.max_num_seqs} sequences"
        size = f"{size_text(self.block_bytes)} = {size_text(self.min_blocks * self.block_bytes)}"
        return f"{self.min_blocks} KV blocks (1 null + {parts}) x {size}"

    def _fitting_settings(self, budget_bytes: int) -> list[str]:
        """Returns each setting that would suffice if only it were lowered, with the largest value that
        fits."""

        def largest(low: int, end: int, lowered: Callable[[int], Demand]) -> int | None:
            return _largest(low, end, lambda value: lowered(value).min_bytes <= budget_bytes)

        largest_values = (
            ("max_num_seqs", largest(1, self.max_num_seqs, lambda n: replace(self, max_num_seqs=n))),
            ("cached_states", largest(0, self.slots.cached, lambda n: replace(self, num_cached_states=n))),
            ("max_model_len", largest(1, self.max_model_len, lambda n: replace(self, max_model_len=n))),
            ("num_speculative", largest(0, self.num_speculative, lambda n: replace(self, num_speculative=n))),
        )
        return [f"`{name}` {value}" for name, value in largest_values if value is not None]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Returns the number of blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def size_text(num_bytes: int) -> str:
    """Formats a number of bytes in the largest unit in which it is at least 1."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def _largest(low: int, end: int, fits: Callable[[int], bool]) -> int | None:
    """Returns the largest of ``low … end - 1`` that fits, or None.

    If a value fits, all smaller values have to fit too.
    """
    if end <= low or not fits(low):
        return None
    while end - low > 1:
        middle = (low + end) // 2
        low, end = (middle, end) if fits(middle) else (low, middle)
    return low
