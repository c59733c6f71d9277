"""What ranks of a lockstep group say to each other: who they are, what they have to compute, that they go."""

from __future__ import annotations

from wire.codec import message


@message
class StepShape:
    """What the size of a step's collectives follows from; ranks agree on the largest of each figure."""

    num_rows: int
    """Decode rows, padded to a captured size; of a mixed step those of ranks without prompts."""
    num_tokens: int
    """Positions of all rows; 0: there is nothing to compute."""
    is_mixed: bool
    """Whether any rank runs a stretch of prompt, so that tokens are not positions of decode rows alone."""


NOTHING = StepShape(0, 0, False)


def largest(shapes: list[StepShape]) -> StepShape:
    """The step that has room for all of these."""
    return StepShape(
        max(shape.num_rows for shape in shapes),
        max(shape.num_tokens for shape in shapes),
        any(shape.is_mixed for shape in shapes),
    )


@message
class Hello:
    """First message on a connection, both ways."""

    secret: str
    """Of the group's life; whoever was told it by the group's store belongs to it."""
    rank: int
    terms: dict[str, str]
    """What has to be the same on all ranks."""
    name: str
    """Of the rank, for messages."""


@message
class Refusal:
    """To a rank that knows the secret and is not let in, instead of a greeting."""

    reason: str


@message
class Wish:
    """The sender is in round ``number`` and has so much to compute. Nobody is in the next before all are."""

    number: int
    shape: StepShape


@message
class Alive:
    """Said again and again, so that silence means something."""


@message
class Leaving:
    """The sender has nothing left to compute and ends as soon as all say so."""
