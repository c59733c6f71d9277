"""Starts of a leaving server are divided among those that stay."""

from kv_transfer.starts.heirs import Heirs


def keys(text):
    return [text[: i + 1].encode() for i in range(len(text))]


def test_starts_of_one_conversation_go_to_one_server_and_others_in_turn():
    heirs = Heirs(["a", "b", "c"])
    assert [heirs.choose(keys(text)) for text in ("abcdef", "ABCDEF", "123456", "xyz")] == [
        "a",
        "b",
        "c",
        "a",
    ]
    assert heirs.choose(keys("abcdefgh")) == "a"
    assert heirs.choose(keys("ABC")) == "b"
    assert heirs.choose(keys("123")) == "c"


def test_a_short_common_beginning_binds_nothing():
    heirs = Heirs(["a", "b"])
    assert [heirs.choose(keys(text)) for text in ("sysone1", "systwo2", "sysfive")] == ["a", "b", "a"]


def test_a_single_server_gets_all():
    heirs = Heirs(["a"])
    assert {heirs.choose(keys(text)) for text in ("ab", "cd", "ef")} == {"a"}
