"""The table of bounds, over HTTP: a value at a bound is accepted, a value above it is refused by name."""

import json
import threading

import pytest
from jsonschema_rs import Draft202012Validator

from router.http.bodies import body_room
from router.http.bodies.body_room import FREE_BYTES
from router.http.bodies.bounds import BOUNDS, CHARACTERS, FIELDS, SESSION, Bound, check_bounds
from testing.conditions import PROMPT_S, until
from testing.repository import DOCS
from testing.router.scripted_router import MODEL, raw_request
from testing.router.scripted_servers import hanging, saying
from wire.errors import InvalidRequestError
from wire.messages.sampling_params import RANGES

MAX_TEST_SIZE = 8 << 20
"""No body is larger by default."""
URLS = (
    *("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"),
    *("/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"),
)
MODELS = {"model": MODEL}
CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "look"}}


def filled(bound: Bound, size: int):
    """A body that has ``size`` where the bound looks."""
    if bound.unit == CHARACTERS:
        value = "a" * size
    elif bound.unit in ("entries", "fields"):
        value = {str(i): 0 for i in range(size)}
    else:
        value = [{"messages": USER, "tool_calls": CALL, "tools": TOOL}.get(bound.field, 0)] * size
    if bound is FIELDS:
        return value
    for step in reversed(bound.field.split(".")):
        value = {step.removesuffix("[]"): [value] if step.endswith("[]") else value}
    return value


@pytest.mark.parametrize("bound", [*BOUNDS, FIELDS], ids=lambda bound: f"{bound.field}-{bound.unit}")
def test_what_is_at_its_bound_passes_and_one_more_does_not(bound):
    check_bounds(filled(bound, bound.limit))
    for size in (bound.limit + 1, min(100 * bound.limit, MAX_TEST_SIZE)):
        with pytest.raises(InvalidRequestError) as refused:
            check_bounds(filled(bound, size))
        message = refused.value.message
        assert f"has {size} {bound.unit}, the limit is {bound.limit}: {bound.remedy}" in message
        assert len(message) < 300


def test_what_is_nested_counts_in_full():
    body = {"tools": [{"a" * 1000: ["b" * ((1 << 20) - 1002), 5, None]}]}
    check_bounds(body)
    body["tools"][0]["x"] = ""
    with pytest.raises(InvalidRequestError, match="tools has 1048577 characters"):
        check_bounds(body)


@pytest.mark.parametrize("value", [None, 5, True, "a", [], {}, [[]], [None], [{"content": 5}], {"choice": 5}])
def test_values_of_other_types_are_left_to_who_checks_types(value):
    for bound in BOUNDS:
        check_bounds({bound.field.split("[")[0].split(".")[0]: value})


async def test_each_bound_holds_over_http_and_the_next_request_is_served(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    for bound in (*BOUNDS, FIELDS):
        field = bound.field.split("[")[0].split(".")[0]
        at, above = filled(bound, bound.limit), filled(bound, bound.limit + 1)
        for url in URLS:
            refused = await stack.client.post(url, json=above)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert f"the limit is {bound.limit}" in error["message"], error
            if not url.startswith("/v1/messages"):  # Anthropic's form has no such field
                assert error["param"] == (None if bound is FIELDS else field)
        passed = await stack.client.post("/v1/chat/completions", json=at)
        assert f"{bound.unit}, the limit is {bound.limit}:" not in passed.text
    assert (await stack.complete()).status_code == 200


async def test_a_session_that_is_too_long_is_refused(make_stack):
    stack = await make_stack(session_header="X-Session")
    stack.decode[0].script = saying([300])
    for size, status in ((SESSION.limit, 200), (SESSION.limit + 1, 400), (20 * SESSION.limit, 400)):
        headers = {"X-Session": "s" * size}
        answer = await stack.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "X-Session"
    assert await stack.metric("twinfang_requests_total", outcome="refused") == 2


# --- all bodies together ---------------------------------------------------------------------------


async def test_bodies_have_room_together_and_small_ones_always(make_stack):
    stack = await make_stack(max_body_bytes=200_000)
    stack.decode[0].script = saying([300])
    room = stack.app.state.body_room
    large = json.dumps(MODELS | {"prompt": "hello", "max_tokens": 1, "x": "a" * 190_000}).encode()
    clients = []
    for _ in range(room.limit("address 127.0.0.1") // (190_000 - FREE_BYTES)):
        before = room.num_bytes
        clients.append(await raw_request(stack, large[:-10], content_length=len(large)))
        await until(lambda before=before: room.num_bytes >= before + 190_000 - FREE_BYTES)
    json_type = {"Content-Type": "application/json"}
    refused = await stack.client.post("/v1/completions", content=large, headers=json_type)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "2")
    limit = f"the limit is {room.limit('address 127.0.0.1')}, half of what others leave of {room.max_bytes}"
    assert limit in refused.json()["error"]["message"]
    assert (await stack.complete(max_tokens=1)).status_code == 200
    for _reader, writer in clients:
        writer.close()
    await until(lambda: room.num_bytes == 0)
    assert (await stack.client.post("/v1/completions", content=large, headers=json_type)).status_code == 200


async def test_what_large_bodies_leave_behind_is_given_back_once_there_are_none(make_stack, monkeypatch):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    given_back = threading.Event()
    monkeypatch.setattr(body_room, "TRIM_AFTER_S", 0.01)
    monkeypatch.setattr(body_room, "give_back", given_back.set)
    body = json.dumps(MODELS | {"prompt": "hello", "max_tokens": 1, "x": "a" * 1_000_000}).encode()
    await stack.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    await until(given_back.is_set)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_under_way_keeps_nothing_of_its_body(make_stack, stream):
    """And the client is noticed when it goes, though reading had stopped while the body waited."""
    stack = await make_stack()
    stack.decode[0].script = hanging
    body = json.dumps(MODELS | {"prompt": "hello", "stream": stream, "x": "a" * 1_000_000}).encode()
    _reader, writer = await raw_request(stack, body)
    await until(lambda: stack.decode[0].submitted)
    assert stack.app.state.body_room.num_bytes == 0
    writer.close()
    await until(lambda: stack.gate.num_in_flight == 0, timeout_s=PROMPT_S)


def test_the_docs_have_the_table():
    page = (DOCS / "limits.md").read_text()
    for bound in (FIELDS, SESSION, *BOUNDS):
        field = bound.field if bound in (FIELDS, SESSION) else f"`{bound.field}`"
        assert f"| {field} | {bound.limit:,} {bound.unit} |" in page


# --- what /openapi.json says -----------------------------------------------------------------------

TOTALS = {
    "response_format",
    "structured_outputs",
    "guided_choice",
    "tools",
    "chat_template_kwargs",
    "context_management",
    "output_config",
    "output_format",
    "thinking",
    "text",
    "reasoning",
}
"""The characters of all strings inside of these are bounded, which JSON Schema has no word for."""
UNTYPED = {
    "structured_outputs.choice",
    "messages[].tool_calls",
    "messages[].tool_calls[].function.arguments",
    "messages[].content[].content",
    "messages[].content[].input",
}
UNTYPED |= {bound.field for bound in BOUNDS if bound.field.startswith("input[]")}
"""The schema does not go into these."""


@pytest.fixture
async def schemas(make_stack):
    """Of bodies, by path."""
    stack = await make_stack(ready=False)
    paths = (await stack.client.get("/openapi.json")).json()["paths"]
    posts = {
        path: methods["post"] for path, methods in paths.items() if "requestBody" in methods.get("post", {})
    }
    return {
        path: post["requestBody"]["content"]["application/json"]["schema"] for path, post in posts.items()
    }


def kinds_of(errors) -> set[str]:
    """Of which kinds the errors are, and all that led to them."""
    kinds = set()
    for error in errors:
        kinds.add(error.kind.name)
        for branch in getattr(error.kind, "context", ()):
            kinds |= kinds_of(branch)
    return kinds


def is_told(validators, bound: Bound) -> bool:
    """Whether a schema refuses what is above ``bound`` for that alone, and none what is at it."""
    words = {"maxLength", "maxItems", "maxProperties"}

    def refused_by(size: int) -> set[str]:
        body = filled(bound, size)
        known = [one for names, one in validators if bound is FIELDS or body.keys() <= names]
        return set().union(*(kinds_of(one.iter_errors(body)) for one in known)) & words

    assert not refused_by(bound.limit), bound
    return bool(refused_by(bound.limit + 1))


async def test_the_document_tells_all_bounds_that_json_schema_has_words_for(schemas):
    validators = [(one["properties"].keys(), Draft202012Validator(one)) for one in schemas.values()]
    untold = {(bound.field, bound.unit) for bound in (*BOUNDS, FIELDS) if not is_told(validators, bound)}
    assert {field for field, unit in untold if unit == CHARACTERS} <= TOTALS | UNTYPED
    assert {field for field, unit in untold if unit != CHARACTERS} <= UNTYPED


async def test_the_document_tells_the_ranges_of_numbers(schemas):
    completions, chats = schemas["/v1/completions"], schemas["/v1/chat/completions"]
    for name, (least, most) in RANGES.items():
        field = completions["properties"][name]
        told = (-1 if name == "top_k" else float(least), float(most))  # FastAPI makes them such
        assert (field["minimum"], field["maximum"]) == told, name
    for schema, name, most in (
        (chats, "n", 128),
        (chats, "top_logprobs", 20),
        (completions, "priority", 2**31 - 1),
    ):
        assert schema["properties"][name]["maximum"] == most
    assert chats["properties"]["max_completion_tokens"]["minimum"] == 1
