"""Which blocks and states the segments hold. Pure.

A block is in the index only with all blocks before it: with a block, all that follow it are dropped.
The thread that moves bytes changes the index; other threads may ask whether a key is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kv_transfer.files.names import NameChanges, block_name, state_name
from kv_transfer.files.record import Record


@dataclass(eq=False)
class Contents:
    """What one segment holds."""

    blocks: list[FileBlock] = field(default_factory=list)
    states: list[FileBlock] = field(default_factory=list)
    """Blocks behind which this segment has a state."""


@dataclass(frozen=True)
class Page:
    """Where a page is."""

    contents: Contents
    record: Record
    number: int


@dataclass(eq=False, slots=True)
class FileBlock:
    """A block in files, and the state at its end if there is one."""

    key: bytes
    parent: FileBlock | None
    contents: Contents
    record: Record
    page: int
    """Number of its page in the record."""
    state: tuple[Contents, Record] | None = None
    following: set[FileBlock] | None = None

    @property
    def name(self) -> bytes:
        return block_name(self.key, self.record.number)


class FileIndex:
    """The tree of all blocks in files. ``has_state``: whether a request can start only behind a state.

    ``changes`` notes which blocks and states come and go, by their names.
    """

    def __init__(self, *, has_kv: bool, has_state: bool, changes: NameChanges | None = None) -> None:
        self._has_kv = has_kv
        self._has_state = has_state
        self._changes = changes
        self._blocks: dict[bytes, FileBlock] = {}
        self._starts: deque[tuple[bytes, bool]] = deque()
        """Starts that came (True) and went (False), for routers."""

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def start_changes(self) -> Sequence[tuple[bytes, bool]]:
        """Returns the starts that came and went since the last call, in order. May be called by one other
        thread."""
        return [self._starts.popleft() for _ in range(len(self._starts))]

    def has_block(self, key: bytes) -> bool:
        return key in self._blocks

    def has_start(self, key: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and (block.state is not None or not self._has_state)

    def block_name(self, key: bytes) -> bytes | None:
        """Returns the name of the block with this key; None if it is not there."""
        block = self._blocks.get(key)
        return None if block is None else block.name

    def start_names(self, key: bytes) -> Iterator[bytes]:
        """Yields the names of all that a request needs to start behind a block: of the state, and of the
        blocks up to there, the last one first. Nothing if no request can start there."""
        block = self._blocks.get(key)
        if block is None:
            return
        state = block.state
        if state is not None:
            yield state_name(key, state[1].number)
        elif self._has_state:
            return
        while block is not None:
            yield block.name
            block = block.parent

    def add(self, contents: Contents, record: Record) -> bool:
        """Adds a record. Returns False if files no longer have the block before it, so that it is of no use.

        A block or a state that is there already moves to the new record.
        """
        last = self._blocks.get(record.parent) if record.parent else None
        if record.parent and last is None:
            return False
        for number, key in enumerate(record.keys):
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = FileBlock(key, last, contents, record, number)
                self._note_start(key, not self._has_state, is_there=True)
                if last is not None:
                    last.following = last.following or set()
                    last.following.add(block)
            else:
                self._lost_block(block)
                block.contents, block.record, block.page = contents, record, number
            contents.blocks.append(block)
            if self._changes is not None:
                self._changes.got(block.name)
            last = block
        if last is None:
            return False
        if record.has_state:
            self._drop_state(last)
            last.state = contents, record
            self._note_start(last.key, self._has_state, is_there=True)
            contents.states.append(last)
            if self._changes is not None:
                self._changes.got(state_name(last.key, record.number))
        return True

    def _lost_block(self, block: FileBlock) -> None:
        if self._changes is not None:
            self._changes.lost(block.name)

    def _note_start(self, key: bytes, is_start: bool, *, is_there: bool) -> None:
        if is_start:
            self._starts.append((key, is_there))

    def _drop_state(self, block: FileBlock) -> None:
        self._note_start(block.key, self._has_state and block.state is not None, is_there=False)
        if block.state is not None and self._changes is not None:
            self._changes.lost(state_name(block.key, block.state[1].number))
        block.state = None

    def drop(self, contents: Contents, of: Callable[[Record], bool] = lambda record: True) -> None:
        """Drops what a segment's records hold, or those for which ``of`` holds, and all blocks that follow
        their blocks."""
        for block in contents.states:
            if block.state is not None and block.state[0] is contents and of(block.state[1]):
                self._drop_state(block)
        for block in contents.blocks:
            if self._is_in(block, contents) and of(block.record):
                self._drop(block)
        contents.blocks = [block for block in contents.blocks if self._is_in(block, contents)]
        contents.states = [
            block for block in contents.states if block.state is not None and block.state[0] is contents
        ]

    def _is_in(self, block: FileBlock, contents: Contents) -> bool:
        return self._blocks.get(block.key) is block and block.contents is contents

    def drop_page(self, page: Page) -> None:
        """Drops what a damaged page holds: a block and all that follow it, or a state."""
        for block in list(self._holders(page)):
            if (
                block.state is not None
                and block.state[1] is page.record
                and page.number >= page.record.num_block_pages
            ):
                self._drop_state(block)
            else:
                self._drop(block)

    def _holders(self, page: Page) -> Iterable[FileBlock]:
        record = page.record
        if page.number < record.num_block_pages:
            keys: Sequence[bytes] = record.keys[page.number : page.number + 1]
        else:
            keys = record.keys[-1:] or (record.parent,)
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                yield block

    def _drop(self, block: FileBlock) -> None:
        if block.parent is not None and block.parent.following is not None:
            block.parent.following.discard(block)
        rest = [block]
        while rest:
            one = rest.pop()
            if self._blocks.pop(one.key, None) is not None:
                self._note_start(one.key, not self._has_state, is_there=False)
            self._drop_state(one)
            self._lost_block(one)
            rest += one.following or ()
            one.following = None

    def pages_of(self, start: bytes, keys: Sequence[bytes], *, num_state_pages: int) -> list[Page] | None:
        """Returns where the pages of these blocks are, and behind them those of the state behind block
        ``start``.

        There may be no blocks to read: then the state alone is. None if one of them is gone.
        """
        pages: list[Page] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                return None
            if self._has_kv:
                pages.append(Page(block.contents, block.record, block.page))
        if num_state_pages:
            block = self._blocks.get(start)
            if block is None or block.state is None:
                return None
            contents, record = block.state
            pages += [Page(contents, record, record.num_block_pages + i) for i in range(num_state_pages)]
        return pages

    def place_of(self, key: bytes) -> int:
        """Returns why the state behind this block was kept; 0 if there is none."""
        block = self._blocks.get(key)
        return 0 if block is None or block.state is None else block.state[1].place


def runs(pages: Sequence[Page], most: int) -> Iterator[Sequence[Page]]:
    """Yields runs of at most ``most`` pages that lie behind one another in one record."""
    begin = 0
    for end in range(1, len(pages) + 1):
        last = pages[end - 1]
        goes_on = (
            end < len(pages)
            and pages[end].record is last.record
            and pages[end].number == last.number + 1
            and end - begin < most
        )
        if not goes_on:
            yield pages[begin:end]
            begin = end
