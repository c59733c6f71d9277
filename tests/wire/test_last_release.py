"""What would make processes of the last release misread a message is found by ``make lint``."""

from testing.protocol import faults, last_release, marked, schema
from wire.codec import PROTOCOL_VERSION

RELEASED = {"Cancel": [["request_id", "str", ""], ["why", "str", "''"]]}
NEW = ["note", "str", "''"]


def found(fields, marks=()):
    return list(faults(RELEASED, {"Cancel": fields}, {"Cancel": set(marks)}))


def test_a_field_may_only_be_added_last_and_marked():
    same = RELEASED["Cancel"]
    assert found(same) == found([*same, NEW], ["note"]) == []
    (unmarked,) = found([*same, NEW])
    assert unmarked == "Cancel.note is new: make it with since() or ignorable() of wire/codec.py"
    (moved,) = found([same[0], NEW, same[1]], ["note"])
    assert moved == "Cancel: field 1 was why str '', now note str '': put new fields last"
    (gone,) = found(same[:1])
    assert gone.startswith("Cancel: field 1 was why str '', now nothing")
    (other_default,) = found([same[0], ["why", "str", "'x'"]])
    assert "now why str 'x'" in other_default
    (no_message,) = faults(RELEASED, {}, {})
    assert no_message.startswith("Cancel is gone")


def test_today_s_messages_can_be_read_by_the_last_release():
    release = last_release()
    assert list(faults(release["messages"], schema(), marked())) == []
    assert release["protocol"] <= PROTOCOL_VERSION
