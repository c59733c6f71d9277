"""How API keys are stored: what is kept of them, what is read back, and the error for an unreadable file."""

import math

import pytest

from router.access.api_keys import PREFIX, ApiKey, ApiKeys, digest_of, new_key
from router.access.key_file import KeyFile, key_line, read_keys
from router.access.key_limits import KeyLimits
from wire.errors import ConfigError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys"


def test_a_key_is_found_by_itself_alone(path):
    key, other = new_key(), new_key()
    path.write_text(f"# who\n\n{key_line(ApiKey('alice', digest_of(key)))}  # since May\n")
    keys = read_keys(path)
    assert keys.find(key) == ApiKey("alice", digest_of(key))
    for wrong in (other, key[:-1], key + "x", key.upper(), "", digest_of(key).hex(), "é" * 40):
        assert keys.find(wrong) is None
    assert key not in path.read_text()


def test_keys_can_not_be_guessed_and_can_be_recognised():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) for key in keys)
    alphabet = set("".join(key.removeprefix(PREFIX) for key in keys))
    shortest = min(len(key) for key in keys) - len(PREFIX)
    assert shortest * math.log2(len(alphabet)) >= 256


def test_what_a_key_may_ask_for_is_read_back(path):
    written = ApiKey("batch.1", digest_of("k"), min_priority=-2_000_000_000)
    path.write_text(key_line(written))
    assert read_keys(path).find("k") == written


def test_limits_are_read_back(path):
    limits = KeyLimits(60, 100_000, tokens_per_month=10**15)
    written = ApiKey("trial", digest_of("k"), 3, limits)
    path.write_text(key_line(written))
    assert path.read_text().endswith(
        " min_priority=3 requests_per_minute=60 tokens_per_minute=100000 tokens_per_month=1000000000000000"
    )
    assert read_keys(path).find("k") == written


def test_a_role_is_read_back(path):
    written = ApiKey("prometheus", digest_of("k"), limits=KeyLimits(60), role="view")
    path.write_text(key_line(written))
    assert path.read_text().endswith(" requests_per_minute=60 role=view")
    assert read_keys(path).find("k") == written


def test_two_keys_may_have_one_name(path):
    path.write_text("\n".join(key_line(ApiKey("alice", digest_of(key))) for key in "ab"))
    assert {read_keys(path).find(key).name for key in "ab"} == {"alice"}


SECRET = new_key()
DIGEST = f"sha256:{digest_of('x').hex()}"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (f"alice {SECRET}", "line 1: expected sha256:"),
        (
            f"\n{SECRET} {DIGEST} {SECRET}",
            r"line 2: only min_priority=<integer>, role=view\|operate\|configure and limits ",
        ),
        (f"{SECRET}{SECRET} {DIGEST}", "line 1: a key's name"),
        ("alice", "line 1: expected sha256:"),
        (f"alice {DIGEST} min_priority=high", "min_priority=<integer>"),
        (f"alice {DIGEST} role=root", "role=view"),
        (f"alice {DIGEST} role=view role=configure", "line 1: role is given twice"),
        (
            f"alice {DIGEST} tokens_per_week=5",
            "limits .requests_per_minute, tokens_per_minute, tokens_per_day",
        ),
        (f"alice {DIGEST} tokens_total=0", "tokens_total must be from 1 to 1000000000000000, got 0"),
        (f"alice {DIGEST} tokens_total=5 tokens_total=6", "line 1: tokens_total is given twice"),
        (f"alice {DIGEST} min_priority=3000000000", "min_priority must be from -2147483647 to 2147483647"),
        (f"a {DIGEST}\nb {DIGEST}", "line 2: another line has the same key"),
    ],
    ids=[
        "key",
        "key behind",
        "key first",
        "name alone",
        "priority",
        "role",
        "2 roles",
        "no limit",
        "0",
        "2 limits",
        "range",
        "twice",
    ],  # no secret
)
def test_a_bad_line_is_named_and_not_shown(path, content, part):
    path.write_text(content)
    with pytest.raises(ConfigError, match=part) as raised:
        read_keys(path)
    assert SECRET not in raised.value.message


def test_a_file_that_is_not_there_is_named(path):
    with pytest.raises(ConfigError, match=str(path)):
        KeyFile(path)


def test_a_changed_file_counts_and_a_broken_one_does_not(path, caplog):
    path.write_text(key_line(ApiKey("alice", digest_of("a"))))
    file = KeyFile(path)
    path.write_text(key_line(ApiKey("bob", digest_of("bob's"))))
    file.look()
    assert file.keys.find("a") is None
    assert file.keys.find("bob's").name == "bob"
    path.write_text(f"bob {SECRET}")
    file.look()
    assert file.keys.find("bob's").name == "bob"
    path.unlink()
    file.look()
    assert file.keys.find("bob's").name == "bob"
    assert caplog.text.count("the API keys stay as they were") == 2
    assert SECRET not in caplog.text


def test_nobody_gets_in_with_no_keys():
    assert ApiKeys(()).find("") is None
