"""Messages between a server and a lane, a process that follows grammars for it.

In shapes, ``W`` is the number of 32-bit words with one bit for each token of the vocabulary.
"""

from __future__ import annotations

from wire.codec import message


@message
class Job:
    """Asks a lane to follow one answer further and to say which tokens may come next."""

    key: int
    """Key of the follower, unique in the server."""
    grammar: str | None
    """The grammar to begin with, at the start of the answer; None: the lane has the follower already."""
    token_ids: tuple[int, ...]
    """Tokens that the answer has gained since the last job."""
    drafts: tuple[int, ...]
    """Draft tokens after ``token_ids``."""
    salt: str = ""
    """Only answers with the same salt share a compiled grammar."""


@message
class Jobs:
    """All jobs that the lane has to do now, in this order."""

    jobs: tuple[Job, ...]
    ended: tuple[int, ...]
    """Keys of followers that are no longer needed; the lane drops them before it does the jobs."""


@message
class LaneReady:
    """A lane's first message."""

    error: str | None
    """Why the lane can't follow grammars of this model; None: it can."""


@message
class Followed:
    """The answer to one :class:`Job`."""

    key: int
    masks: bytes
    """Bits ``[1 + drafts, W]`` int32 of the tokens that may come next; all ones after a forbidden draft."""
    error: str | None
    """The words "can't be compiled" or "can't be followed", and the reason; None: no error."""
    is_slow: bool
    """Whether the follower takes so long that it should have a lane of its own."""


@message
class FollowedAll:
    """Answers to the next jobs of a batch, in the order of the jobs."""

    followed: tuple[Followed, ...]
