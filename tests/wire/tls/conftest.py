"""An authority that only these tests trust."""

import pytest

from testing.certificates import Authority


@pytest.fixture(scope="package")
def authority() -> Authority:
    return Authority()
