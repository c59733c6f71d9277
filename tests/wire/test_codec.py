"""The codec gives back what it was given, and refuses everything else with a clear error."""

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.codec import MAX_MESSAGE_BYTES, MAX_UNKNOWN_FIELDS, PROTOCOL_VERSION, decode, encode
from wire.errors import InvalidRequestError, TwinfangError, WireError, error_from_code
from wire.messages.generation import Cancel, RequestOutput, StepOutputs, Submit, TokenLogprobs
from wire.messages.handoff import Ticket
from wire.messages.sampling_params import SamplingParams, Thinking
from wire.outbox import MAX_NUMBERS, Outbox

token_ids = st.lists(st.integers(0, 2**31), max_size=20).map(tuple)
marks = st.lists(st.integers(0, 2**31), min_size=1, max_size=16).map(tuple)
thinkings = st.builds(
    Thinking,
    begin_token_ids=marks,
    end_token_ids=marks,
    is_open=st.booleans(),
    budget=st.none() | st.integers(0, 2**31),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(16, 4096),
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100)), max_size=3).map(tuple),
    min_tokens=st.integers(0, 16),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    thinking=st.none() | thinkings,
)
tickets = st.builds(
    Ticket,
    request_id=st.text(max_size=8),
    lease_id=st.integers(0, 99),
    epoch=st.integers(0, 2**62),
    address=st.just("127.0.0.1:1"),
    incarnation=st.text(max_size=8),
    num_tokens=st.integers(1, 99),
    block_ids=st.lists(st.integers(1, 99), max_size=9).map(tuple),
    state_slot=st.integers(1, 99),
    ttl_s=st.floats(0.1, 100),
)
submits = st.builds(
    Submit, request_id=st.text(), token_ids=token_ids, params=params, ticket=st.none() | tickets
)
logprobs = st.builds(
    TokenLogprobs,
    token_id=st.integers(0, 9),
    logprob=st.floats(-50, 0),
    rank=st.integers(1, 9),
    top=st.lists(st.tuples(st.integers(0, 9), st.floats(-50, 0)), max_size=3).map(tuple),
)
outputs = st.builds(
    RequestOutput,
    request_id=st.text(),
    token_ids=token_ids,
    logprobs=st.none() | st.lists(logprobs, max_size=3).map(tuple),
    finish_reason=st.sampled_from(["stop", "length", None]),
)


@given(submits)
def test_a_submitted_request_survives_the_wire(message):
    assert decode(encode(message), Submit) == message


def gathered(given_outputs):
    return Outbox(given_outputs).take()


@given(st.lists(outputs, max_size=4).map(gathered))
def test_step_outputs_survive_the_wire(message):
    assert decode(encode(message), StepOutputs) == message


outputs_of_three = st.builds(
    lambda output, name: replace(output, request_id=name), outputs, st.sampled_from("abc")
)


@given(st.lists(outputs_of_three))
def test_a_request_s_outputs_keep_their_order(given_outputs):
    """Its tokens are the same; of several plain outputs in a row there may be one."""

    def told(all_outputs, request_id):
        news = []
        for output in all_outputs:
            if output.request_id == request_id:
                rest = replace(output, token_ids=())
                news += [*output.token_ids, *([] if output.is_plain else [rest])]
        return news

    for request_id in "abc":
        assert told(gathered(given_outputs), request_id) == told(given_outputs, request_id)


def reporting(request_id, token_id, num_top):
    top = tuple((i, -float(i)) for i in range(num_top))
    return RequestOutput(request_id, (token_id,), logprobs=(TokenLogprobs(token_id, -0.5, 1, top),))


def test_log_probabilities_of_many_requests_leave_in_several_messages():
    """Whoever reads a message does nothing else meanwhile."""
    given_outputs = [reporting(f"r{i}", step, 20) for step in range(3) for i in range(128)]
    outbox, messages = Outbox(given_outputs), []
    outbox.add_tokens("plain", (1,))
    while outbox:
        messages.append(outbox.take_message())
    assert len(messages) == 2
    assert all(sum(output.num_logprobs for output in message.outputs) <= MAX_NUMBERS for message in messages)
    assert [output for message in messages for output in message.outputs] == given_outputs
    assert [message.token_ids for message in messages] == [{"plain": (1,)}, {}]


def test_tokens_that_come_while_a_request_s_outputs_wait_stay_behind_them():
    outbox = Outbox([reporting("a", step, MAX_NUMBERS - 1) for step in range(2)])
    assert [output.token_ids for output in outbox.take_message()] == [(0,)]
    outbox.add_tokens("a", (2,))
    assert [output.token_ids for output in outbox.take_message()] == [(1,), (2,)]
    outbox.add_tokens("a", (3,))
    assert outbox.take_message().token_ids == {"a": (3,)}


def test_an_output_with_more_than_a_message_s_log_probabilities_travels_alone():
    outbox = Outbox([reporting("a", 1, 2 * MAX_NUMBERS), reporting("b", 2, 1)])
    assert [len(outbox.take_message()), len(outbox.take_message()), bool(outbox)] == [1, 1, False]


@pytest.mark.parametrize("item", [["3", -1.0], [3], [3, -1.0, 1], [True, -1.0], "ab", b"ab", 7])
def test_an_alternative_of_the_wrong_form_is_named(item):
    envelope = msgpack.unpackb(encode(StepOutputs({}, (reporting("a", 1, 3),))))
    envelope[2][1][0][2][0][3][2] = item
    with pytest.raises(WireError, match=r"outputs\[0\]\.logprobs\[0\]\.top\[2\]"):
        decode(msgpack.packb(envelope), StepOutputs)


def test_a_whole_number_that_stands_for_a_log_probability_becomes_one():
    envelope = msgpack.unpackb(encode(StepOutputs({}, (reporting("a", 1, 3),))))
    envelope[2][1][0][2][0][3][2] = [2, -2]
    top = decode(msgpack.packb(envelope), StepOutputs).outputs[0].logprobs[0].top
    assert top == ((0, 0.0), (1, -1.0), (2, -2.0))
    assert type(top[2][1]) is float


def test_fields_with_their_default_values_do_not_travel():
    assert len(encode(RequestOutput("name", (1,)))) < len("RequestOutput") + 16
    empty = msgpack.packb([PROTOCOL_VERSION, "RequestOutput", ["name", [1]]])
    assert decode(empty, RequestOutput) == RequestOutput("name", (1,))
    newer = ["name", [1], *[None] * 7]
    for fields in ([], ["name"], [*newer, *[None] * (MAX_UNKNOWN_FIELDS + 1)]):
        with pytest.raises(WireError, match="2 to 41 fields"):
            decode(msgpack.packb([PROTOCOL_VERSION, "RequestOutput", fields]), RequestOutput)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_a_wire_error_and_nothing_else(data):
    with pytest.raises(TwinfangError):
        decode(data, Submit)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_like)
def test_wellformed_msgpack_of_the_wrong_shape_is_refused(fields):
    data = msgpack.packb([PROTOCOL_VERSION, "Submit", fields])
    with pytest.raises(TwinfangError):
        decode(data, Submit)


def test_another_protocol_version_is_refused_with_both_versions():
    ours = PROTOCOL_VERSION
    data = msgpack.packb([ours + 1, "Cancel", ["r"]])
    with pytest.raises(WireError, match=rf"version {ours + 1}, this process version {ours}:"):
        decode(data, Cancel)
    old = msgpack.packb([6, "Cancel", ["r"]])
    with pytest.raises(WireError, match=r"speaks protocol version 6, .*upgrade by one release at a time"):
        decode(old, Cancel)


def test_an_unexpected_message_is_named():
    with pytest.raises(WireError, match=r"expected Submit, got 'Cancel'"):
        decode(encode(Cancel("r")), Submit)


def test_a_field_of_the_wrong_type_is_named():
    data = msgpack.packb([PROTOCOL_VERSION, "Cancel", [7]])
    with pytest.raises(WireError, match=r"Cancel\.request_id: expected str, got int"):
        decode(data, Cancel)


def test_a_bool_is_no_int():
    message = Submit("r", (1,), SamplingParams(max_tokens=1), None)
    envelope = msgpack.unpackb(encode(message))
    envelope[2][1] = [True]
    with pytest.raises(WireError, match="expected int, got bool"):
        decode(msgpack.packb(envelope), Submit)


def test_a_message_beyond_the_limit_is_refused_before_it_is_parsed():
    with pytest.raises(WireError, match="exceeds the limit"):
        decode(b"\x90" * (MAX_MESSAGE_BYTES + 1), Cancel)


def test_sampling_parameters_are_checked_on_arrival_as_well():
    message = Submit("r", (1,), SamplingParams(max_tokens=1), None)
    envelope = msgpack.unpackb(encode(message))
    envelope[2][2][0] = -1
    with pytest.raises(InvalidRequestError, match="max_tokens must be between 0"):
        decode(msgpack.packb(envelope), Submit)


def test_an_error_keeps_its_class_across_processes():
    error = error_from_code("context_length_exceeded", "too long")
    assert type(error).__name__ == "ContextLengthError"
    assert error.http_status == 400
    assert type(error_from_code("from_the_future", "?")) is TwinfangError
