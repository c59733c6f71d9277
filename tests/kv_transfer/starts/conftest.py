"""Deadlines that a busy machine meets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer.leases import source
from kv_transfer.starts import hand_over, start_reader, start_transfer


@pytest.fixture(scope="module")
def patient() -> Iterator[None]:
    """A loan lasts, and a read may take, as long as a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "START_TTL_S", 600.0)
        patch.setattr(start_reader, "ASK_S", 60.0)
        patch.setattr(start_transfer, "PATIENCE_S", 60.0)
        patch.setattr(start_transfer, "TRANSFER_S", 120.0)
        patch.setattr(hand_over, "OFFER_S", 60.0)
        patch.setattr(hand_over, "HAND_OVER_S", 120.0)
        yield
