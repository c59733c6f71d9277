"""Releases next to each other understand one another's messages."""

import msgpack
import pytest

from wire import codec
from wire.codec import FIRST_VERSION, PROTOCOL_VERSION, decode, encode, ignorable, message, since, version_of
from wire.errors import ProtocolVersionError, error_from_code
from wire.messages.generation import Cancel, Describe, ServerInfo

NEXT = PROTOCOL_VERSION + 1


@message
class Part:
    name: str
    meant: int = since(NEXT, 0)


@message
class Whole:
    parts: tuple[Part, ...]
    by_name: dict[str, Part]
    one: Part | Cancel | None = ignorable(None)
    note: str = ignorable("")


@pytest.mark.parametrize(
    ("whole", "version"),
    [
        (Whole((), {}), FIRST_VERSION),
        (Whole((Part("a"),), {}, note="new"), FIRST_VERSION),
        (Whole((Part("a"), Part("b", 1)), {}), NEXT),
        (Whole((), {"a": Part("a", 2)}), NEXT),
        (Whole((), {}, one=Part("a", 2)), NEXT),
        (Whole((), {}, one=Cancel("r")), FIRST_VERSION),
    ],
)
def test_a_message_has_the_version_of_the_newest_field_that_it_uses(whole, version, monkeypatch):
    assert version_of(whole) == version
    data = encode(whole)
    if version > PROTOCOL_VERSION:
        with pytest.raises(ProtocolVersionError, match=f"version {NEXT}, this process"):
            decode(data, Whole)
        monkeypatch.setattr(codec, "PROTOCOL_VERSION", NEXT)
    assert decode(data, Whole) == whole


def test_fields_that_a_reader_does_not_know_are_ignored_in_inner_messages_too():
    newer = [FIRST_VERSION, "Whole", [[["a", 0, "newer"]], {}, None, "note", ["newer"]]]
    assert decode(msgpack.packb(newer), Whole) == Whole((Part("a"),), {}, note="note")


def test_a_peer_that_is_two_releases_behind_is_refused(monkeypatch):
    old = encode(Describe())
    assert decode(old, Describe).protocol == FIRST_VERSION
    monkeypatch.setattr(codec, "PROTOCOL_VERSION", FIRST_VERSION + 2)
    monkeypatch.setattr(codec, "OLDEST_PEER", FIRST_VERSION + 1)
    with pytest.raises(
        ProtocolVersionError, match="version 7, this process versions 8 to 9: upgrade"
    ) as told:
        decode(old, Describe)
    heard = error_from_code(told.value.code, told.value.message)
    assert isinstance(heard, ProtocolVersionError), "the caller learns what kind of error it was"


def test_a_server_s_version_comes_with_its_description():
    info = ServerInfo("decode", "i", "m", "f", 1, 1, 1, 1, (), protocol=NEXT)
    assert decode(encode(info), ServerInfo).protocol == NEXT
