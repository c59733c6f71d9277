"""Messages between ranks of a lockstep group: greetings, the work of a round, leaving."""

from __future__ import annotations

from wire.codec import message


@message
class StepShape:
    """Sizes that determine a step's collectives. Ranks agree on the largest value of each size."""

    num_rows: int
    """Decode rows, padded to a captured size; 0 on a rank that runs a chunk of a prompt."""
    num_tokens: int
    """Positions of all rows; 0 if there is nothing to compute."""
    is_mixed: bool
    """Whether any rank runs a chunk of a prompt, so that tokens are not only positions of decode rows."""


NOTHING = StepShape(0, 0, False)


def largest(shapes: list[StepShape]) -> StepShape:
    """Returns the smallest shape that has room for all of these."""
    return StepShape(
        max(shape.num_rows for shape in shapes),
        max(shape.num_tokens for shape in shapes),
        any(shape.is_mixed for shape in shapes),
    )


@message
class Hello:
    """The first message on a connection, in both directions."""

    secret: str
    """The secret of the group's incarnation. A process that read it from the group's store is a member."""
    rank: int
    terms: dict[str, str]
    """The values that must be equal on all ranks."""
    name: str
    """The rank's name, for logs and errors."""


@message
class Refusal:
    """Sent instead of a greeting to a rank that knows the secret but is refused."""

    reason: str


@message
class Wish:
    """The sender is in round ``number`` and has ``shape`` to compute.

    No rank enters the next round before all ranks have sent their wishes for round ``number``.
    """

    number: int
    shape: StepShape


@message
class Alive:
    """Sent at regular intervals, so that a silent rank is known to be gone."""


@message
class Leaving:
    """The sender has nothing left to compute. It ends as soon as all ranks have sent this message."""
