"""What a request costs its key, by how it ended."""

import pytest

from router.serving.usage import Usage, billed_tokens
from wire.errors import CancelledRequestError, DeadlineError, InvalidRequestError, UnavailableError


@pytest.mark.parametrize(
    ("error", "num_answered", "billed"),
    [
        (None, 5, 105),
        (UnavailableError("no server"), 0, 0),
        (UnavailableError("no server"), 5, 105),
        (RuntimeError("a bug"), 0, 0),
        (CancelledRequestError("its client left"), 0, 100),
        (InvalidRequestError("a grammar that allows nothing"), 0, 100),
        (
            DeadlineError("a client chose it"),
            0,
            100,
        ),  # or prompts would be free
        (DeadlineError("a client chose it"), 5, 105),
    ],
)
def test_a_request_costs(error, num_answered, billed):
    assert billed_tokens(Usage(100, num_answered, None), error) == billed
