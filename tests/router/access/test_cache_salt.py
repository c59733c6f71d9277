"""Whose cached prompts a request may share."""

from itertools import combinations

import pytest

from router.access.api_keys import NOBODY, ApiKey
from router.access.cache_salt import cache_salt

ALICE, BOB = ApiKey("alice", b""), ApiKey("bob", b"")
GIVEN = ("", "a", "key alice ", "key alice a", "alice", "given a")


def test_no_two_keys_share_a_salt_whatever_their_clients_send():
    salts = {key.name: {cache_salt(key, given, "key") for given in GIVEN} for key in (ALICE, BOB, NOBODY)}
    assert all(len(each) == len(GIVEN) for each in salts.values()), "each salt that a client sends divides"
    for one, other in combinations(salts.values(), 2):
        assert not one & other


@pytest.mark.parametrize("given", GIVEN)
def test_without_isolation_the_client_s_salt_alone_counts(given):
    assert len({cache_salt(key, given, "none") for key in (ALICE, BOB, NOBODY)}) == 1


def test_requests_without_key_and_salt_share_as_before():
    assert cache_salt(NOBODY, "", "key") == ""


def test_keys_of_one_name_share():
    assert cache_salt(ApiKey("alice", b"1"), "", "key") == cache_salt(ApiKey("alice", b"2"), "", "key")
