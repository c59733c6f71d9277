"""What of a client's traceparent header is taken, and what the wire lets through."""

import pytest

from wire.codec import encode
from wire.errors import WireError
from wire.messages.generation import PrefillRequest, Submit
from wire.messages.sampling_params import SamplingParams
from wire.messages.traceparent import is_sampled, traceparent_of, with_span
from wire.rpc import decode_stream_request

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_header_is_taken_as_it_is():
    assert traceparent_of(GOOD) == GOOD
    assert is_sampled(GOOD)
    assert not is_sampled(f"00-{TRACE}-{SPAN}-00")
    assert not is_sampled("")
    assert with_span(GOOD, "1" * 16) == f"00-{TRACE}-{'1' * 16}-01"


def test_of_a_later_version_the_known_part_counts():
    assert traceparent_of(f"cc-{TRACE}-{SPAN}-03-what-else") == f"00-{TRACE}-{SPAN}-03"


BAD = [
    "",
    "nonsense",
    GOOD.upper(),
    f"{GOOD}-more",
    f"{GOOD}\n",
    f"ff-{TRACE}-{SPAN}-01",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-{SPAN}",
    f"00-{TRACE}-{SPAN}-1",
    f"cc-{TRACE}-{SPAN}-01.more",
]


@pytest.mark.parametrize("header", BAD)
def test_what_is_no_traceparent_is_ignored(header):
    assert traceparent_of(header) == ""


@pytest.mark.parametrize("value", [*BAD[1:], "x" * 10_000], ids=range(len(BAD)))
def test_the_wire_refuses_what_is_none(value):
    with pytest.raises(WireError, match="traceparent"):
        Submit("a", (1,), SamplingParams(max_tokens=1), None, traceparent=value)
    with pytest.raises(WireError, match="traceparent"):
        PrefillRequest("a", (1, 2), traceparent=value)


def test_it_travels():
    submit = Submit("a", (1,), SamplingParams(max_tokens=1), None, traceparent=GOOD)
    assert decode_stream_request(encode(submit)) == submit
