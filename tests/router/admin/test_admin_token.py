"""How the admin token is stored."""

import hashlib

import pytest

from router.admin.admin_token import AdminToken
from testing.router.admin_calls import TOKEN
from wire.errors import ConfigError


def test_a_token_is_kept_as_its_digest_and_may_come_as_one(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"sha256:{hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
    token = AdminToken.from_file(path)
    assert token.matches(TOKEN.encode())
    assert not token.matches(path.read_bytes().strip())
    assert TOKEN not in str(vars(token))


@pytest.mark.parametrize("text", ["", "short", "two words that are long", b"\xff\xfe" * 10])
def test_a_token_that_could_be_guessed_is_refused_at_the_start(tmp_path, text):
    path = tmp_path / "token"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=str(path)):
        AdminToken.from_file(path)
