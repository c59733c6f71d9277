"""What a server says to a lane, a process that follows grammars for it, and what the lane answers."""

from __future__ import annotations

from wire.codec import message


@message
class Job:
    """Follow one answer further and say what may come next."""

    key: int
    """Of the follower, unique in the server."""
    grammar: str | None
    """Begin with this one, at the start of the answer; None: the lane has the follower already."""
    token_ids: tuple[int, ...]
    """Tokens the answer has gained since the last job."""
    drafts: tuple[int, ...]
    """Guesses of the tokens behind these."""


@message
class Jobs:
    """All that is to be done now, in this order."""

    jobs: tuple[Job, ...]
    ended: tuple[int, ...]
    """Keys of followers that are no longer needed; dropped before the jobs."""


@message
class LaneReady:
    """A lane's first message."""

    error: str | None
    """Why it can't follow grammars of this model."""


@message
class Followed:
    """The answer to one :class:`Job`."""

    key: int
    masks: bytes
    """Bits ``[1 + drafts, W]`` int32 of the tokens that may come next; ones behind a forbidden draft."""
    error: str | None
    """That the grammar "can't be compiled" or "can't be followed", and why."""
    is_slow: bool
    """The follower takes so long that it should have a lane of its own."""


@message
class FollowedAll:
    """Answers to the next jobs of a batch, in their order."""

    followed: tuple[Followed, ...]
