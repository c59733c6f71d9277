"""``/v1/messages`` over HTTP, before scripted servers: answers, streams, and what is refused."""

import asyncio
import json

import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.api.anthropic.message_body import CountBody, MessageBody
from router.api.anthropic.message_writer import MessageWriter
from router.http.bodies.bounds import BOUNDS, CHARACTERS
from testing.conditions import until
from testing.router.message_events import message_of, read_events
from testing.router.scripted_router import MODEL, raw_request, why_not_ready
from testing.router.scripted_servers import MAX_MODEL_LEN, failing, hanging, saying
from testing.router.tokenizers import EOS
from wire.errors import TwinfangError

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
CALLS = 'I look.<tool_call>{"name": "look", "arguments": {"at": "Rom"}}</tool_call>'


async def asked(stack, path="/v1/messages", **body):
    return await stack.client.post(path, json={"model": MODEL, "max_tokens": 60, "messages": HELLO} | body)


async def told(stack, **body):
    """Returns the message of an answer. Checks that the stream says the same."""
    whole = await asked(stack, **body)
    assert whole.status_code == 200, whole.text
    streamed = await asked(stack, stream=True, **body)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = read_events(streamed.text)
    message, same = whole.json(), message_of(events)
    assert message.pop("id") != same.pop("id")
    for block in (*message["content"], *same["content"]):
        assert block.pop("id", "call_").startswith("call_")
    assert message == same
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    return message


def error_of(response, status, kind):
    """Returns the message of an error. Checks that it has Anthropic's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert len(body["error"]["message"]) < 700
    return body["error"]["message"]


# --- answers ---------------------------------------------------------------------------------------


async def test_a_message_is_the_answer_to_the_templates_prompt(make_stack, words):
    stack = await make_stack()
    answer = words.encode_now("wörld 😀")
    stack.decode[0].script = saying([*answer, EOS], ends=True)
    message = await told(stack, system="be brief", metadata={"user_id": "u"}, service_tier="auto", top_k=5)
    sent = stack.decode[0].submitted[0]
    prompt = stack.tokenizer.decode(list(sent.token_ids), skip_special_tokens=False)
    assert prompt == "<s>system\nbe brief</s>\n<s>user\nhello</s>\n<s>assistant\n"
    assert (sent.params.max_tokens, sent.params.top_k) == (60, 5)
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "wörld 😀"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(sent.token_ids) - 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": len(answer) + 1,
        },
    }


@pytest.mark.parametrize("per_step", [1, 3, 100])
async def test_a_stream_is_the_whole_message_however_many_tokens_come_at_once(make_stack, words, per_step):
    stack = await make_stack()
    stack.decode[0].script = saying([*words.encode_now(CALLS), EOS], ends=True, per_step=per_step)
    message = await told(stack, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=100)
    assert message["stop_reason"] == "tool_use"
    assert message["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "look", "input": {"at": "Rom"}},
    ]


async def test_a_call_that_is_cut_off_has_the_complete_part_of_its_input(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now(CALLS.partition("Rom")[0]))
    message = await told(stack, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=100)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][1] == {"type": "tool_use", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("said", "reason", "sequence", "text"),
    [
        ("one STOP two", "stop_sequence", "STOP", "one "),
        ("one two", "max_tokens", None, "one two"),
    ],
)
async def test_it_says_why_an_answer_ended(make_stack, words, said, reason, sequence, text):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now(said))
    message = await told(stack, stop_sequences=["STOP", "never"])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["content"] == [{"type": "text", "text": text}]


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL], "tool_choice": {"type": "any"}}])
async def test_an_empty_answer_is_one_empty_block(make_stack, more):
    stack = await make_stack()
    stack.decode[0].script = saying([EOS], ends=True)
    message = await told(stack, **more)
    assert message["content"] == [{"type": "text", "text": ""}]
    assert message["stop_reason"] == "end_turn"


async def test_the_count_of_tokens_is_that_of_the_prompt(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("x"))
    body = {
        "system": "be brief",
        "tools": [TOOL],
        "messages": [*HELLO, *HELLO],
        "tool_choice": {"type": "auto"},
    }
    usage = (await told(stack, **body))["usage"]
    counted = await stack.client.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_tokens_after_the_first_take_the_fast_path(make_stack, words, monkeypatch):
    stack = await make_stack()
    stack.decode[0].script = saying([*words.encode_now("wörld 😀, this is a test"), EOS], ends=True)
    told_writer = []
    written = MessageWriter.written
    monkeypatch.setattr(
        MessageWriter,
        "written",
        lambda self, index, delta, answer, *, is_first: (
            told_writer.append(delta) or written(self, index, delta, answer, is_first=is_first)
        ),
    )
    await asked(stack, stream=True)
    assert len(told_writer) <= 4  # the first token, the lane's sample, the end


# --- what is refused -------------------------------------------------------------------------------

TEXT = {"type": "text", "text": "a"}
BAD_PROMPTS = [
    ({"model": 5}, "model: Input should be a valid string"),
    ({"messages": []}, "messages must be a list of at least one message"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "is of type 'image'"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role must be"),
    ({"system": [{"type": "image"}]}, "system[0] is of type 'image'"),
    ({"system": 5}, "system must be a string or a list of at least one block, got 5"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] is of type 'bash_20250124'"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type: Input should be 'auto', 'any'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice 'required' needs tools"),
    ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name must be the name"),
    ({"tool_choice": {"type": "tool", "name": "b"}, "tools": [TOOL]}, "names 'b', which is none"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type: Input should be 'enabled', 'disabled'"),
    ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "format.schema is missing"),
    ({"output_format": {"type": "json"}}, "output_format.type"),
    ({"cache_control": {"type": "forever"}}, "cache_control must be an object of type"),
    ({"chat_template_kwargs": {"messages": []}}, "a field of its own"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ({"container": "c"}, "container is not supported"),
    ({"context_management": {"edits": [{"type": "x"}]}}, "context_management is not supported"),
]
BAD_REQUESTS = [
    ({"messages": [{"role": "user", "content": "word " * 300}]}, "shorten the messages"),
    (
        {"output_config": {"format": FORMAT | {"schema": {"not": {}}}}},
        "output_config.format can't be enforced",
    ),
    (
        {"output_config": {"format": FORMAT}, "tools": [TOOL], "tool_choice": {"type": "any"}},
        "output_config.format can't both be followed",
    ),
    ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ({"max_tokens": MAX_MODEL_LEN}, "maximum context length"),
    ({"stop_sequences": "STOP"}, "stop_sequences: Input should be a valid array"),
    ({"stop_sequences": [""]}, "stop_sequences: a string must have at least 1 character"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"stream": "yes"}, "stream: Input should be a valid boolean"),
    ({"priority": 1 << 40}, "priority must be between"),
]


async def test_every_bad_field_is_named_in_anthropics_form_and_the_next_request_served(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    for fields, part in BAD_PROMPTS + BAD_REQUESTS:
        for stream in (False, True):
            answer = await asked(stack, **({"stream": stream} | fields))
            assert part in error_of(answer, 400, "invalid_request_error")
    for fields, part in BAD_PROMPTS:
        answer = await asked(stack, "/v1/messages/count_tokens", **fields)
        assert part in error_of(answer, 400, "invalid_request_error")
    assert (await asked(stack)).status_code == 200
    assert stack.gate.num_in_flight == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_an_unknown_model_is_not_found(make_stack, path):
    stack = await make_stack()
    assert "another" in error_of(await asked(stack, path, model="another"), 404, "not_found_error")


async def test_every_field_of_a_wrong_type_is_named(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    for path, kind in (("/v1/messages", MessageBody), ("/v1/messages/count_tokens", CountBody)):
        for field in kind.model_fields:
            refused = []
            for wrong in ("wrong", 1.5, [[{}]], {"a": {}}):
                answer = await asked(stack, path, **{field: wrong})
                if answer.status_code != 200:
                    is_unknown = answer.status_code == 404
                    said = "not_found_error" if is_unknown else "invalid_request_error"
                    refused.append(error_of(answer, answer.status_code, said))
                    assert field in refused[-1]
            # a count needs no server, so the numbers that say whose turn it is are not looked at
            assert refused or field == "priority", (path, field)


async def test_a_missing_length_is_asked_for(make_stack):
    stack = await make_stack()
    answer = await stack.client.post("/v1/messages", json={"messages": HELLO})
    assert "max_tokens is missing: it is required" in error_of(answer, 400, "invalid_request_error")


def filled(bound, size):
    """Returns a body with ``size`` where the bound looks."""
    value = "a" * size if bound.unit == CHARACTERS else [TEXT] * size
    value = {str(i): 0 for i in range(size)} if bound.unit == "entries" else value
    for step in reversed(bound.field.split(".")):
        value = {step.removesuffix("[]"): [value] if step.endswith("[]") else value}
    return value


async def test_each_bound_is_told_in_anthropics_form(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    for bound in BOUNDS:
        if bound.field.partition("[")[0].partition(".")[0] in MessageBody.model_fields:
            answer = await asked(stack, **filled(bound, 2 * bound.limit))
            assert f"the limit is {bound.limit}:" in error_of(answer, 400, "invalid_request_error")
    assert (await asked(stack)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_bodies_that_are_no_json_are_refused_in_anthropics_form(make_stack, path):
    stack = await make_stack(max_body_bytes=10_000)
    for body, status, kind, part in (
        (b"", 400, "invalid_request_error", "not valid JSON"),
        (b"{", 400, "invalid_request_error", "not valid JSON"),
        (b"[]", 400, "invalid_request_error", "JSON object"),
        (b'{"messages": ' + b"[" * 9000, 400, "invalid_request_error", "within one another"),
        (b"x" * 20_000, 413, "request_too_large", "the limit is 10000"),
    ):
        answer = await stack.client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert part in error_of(answer, status, kind)


async def test_unknown_urls_and_methods_below_the_path_are_refused_in_anthropics_form(make_stack):
    stack = await make_stack()
    for path in ("/v1/messages/batches", "/v1/messages/count_tokens/x"):
        assert path in error_of(await stack.client.get(path), 404, "not_found_error")
    answer = await stack.client.get("/v1/messages")
    error_of(answer, 405, "invalid_request_error")
    assert answer.headers["allow"] == "POST"
    other = await stack.client.get("/v1/messagesx")
    assert other.json()["error"]["code"] == "unknown_url"


async def test_keys_come_in_either_header(make_stack, tmp_path):
    key, other = new_key(), new_key()
    (tmp_path / "keys").write_text(
        "\n".join(key_line(ApiKey(name, digest_of(k))) for name, k in (("alice", key), ("bob", other)))
    )
    stack = await make_stack(api_keys_file=tmp_path / "keys")
    stack.decode[0].script = saying([300])
    body = {"model": MODEL, "max_tokens": 1, "messages": HELLO}

    async def status(*headers):
        answer = await stack.client.post("/v1/messages", json=body, headers=list(headers))
        if answer.status_code != 200:
            error_of(answer, 401, "authentication_error")
        return answer.status_code

    bearer, plain = ("Authorization", f"Bearer {key}"), ("x-api-key", key)
    assert await status(bearer) == await status(plain) == 200
    assert await status(bearer, plain) == await status(bearer, ("x-api-key", "of another service")) == 200
    assert await status(("Authorization", "Basic x"), plain) == 200
    assert await status() == await status(("x-api-key", "")) == await status(("x-api-key", "wrong")) == 401
    assert await status(("Authorization", "Bearer wrong"), plain) == 401
    assert await status(plain, ("x-api-key", other)) == 401
    models = await stack.client.get("/v1/models")
    assert models.json()["error"]["code"] == "invalid_api_key"


async def test_full_queues_missing_servers_and_drains_are_told_in_anthropics_form(make_stack):
    stack = await make_stack(num_prefill=0, role="both", max_requests_in_flight=1, max_queue=0)
    stack.decode[0].script = hanging
    running = asyncio.create_task(asked(stack))
    await until(lambda: stack.decode[0].submitted)
    full = await asked(stack)
    error_of(full, 429, "rate_limit_error")
    assert full.headers["retry-after"]
    running.cancel()
    await stack.decode[0].stop()
    await until(lambda: why_not_ready(stack))
    gone = await asked(stack)
    error_of(gone, 503, "overloaded_error")
    assert gone.headers["retry-after"] == "1"
    stack.app.state.drain.begin()
    assert "about to stop" in error_of(await asked(stack), 503, "overloaded_error")


async def test_a_stream_that_fails_ends_with_an_error_event(make_stack):
    stack = await make_stack(num_prefill=0, role="both")
    stack.decode[0].script = failing(TwinfangError("secret address"), after=(300,))
    answer = await asked(stack, stream=True)
    *_, last = events = read_events(answer.text)
    assert events[0]["type"] == "message_start"
    assert last["error"]["type"] == "api_error"
    assert last["request_id"] == answer.headers["request-id"]
    assert "secret" not in answer.text


async def test_an_unexpected_exception_is_a_500_in_anthropics_form(make_stack, monkeypatch):
    stack = await make_stack()

    async def broken(*_args, **_kwargs):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(stack.tokenizer, "encode", broken)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = await asked(stack, path)
        assert "secret" not in error_of(answer, 500, "api_error")


async def test_a_body_of_many_small_blocks_is_answered_soon(make_stack):
    """Its cost is linear: 80,000 blocks are about as many as a body may hold."""
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    messages = [{"role": "user", "content": [TEXT] * 4000}] * 20
    body = json.dumps({"max_tokens": 1, "messages": messages}).encode()
    reader, writer = await raw_request(stack, body, path="/v1/messages")
    assert b"400" in await asyncio.wait_for(reader.readline(), 30)
    writer.close()


# --- thinking --------------------------------------------------------------------------------------

THINKS = {
    "chat_template": "{{ messages[-1].content }}{% if enable_thinking is not false %}<think>\n{% endif %}"
}


async def test_thinking_is_a_block_before_the_answer(make_stack, words):
    stack = await make_stack(tokenizer_settings=THINKS, reasoning_parser="qwen3")
    stack.decode[0].script = saying([*words.encode_now("Rome?</think>\n\nRome."), EOS], ends=True)
    message = await told(stack, thinking={"type": "adaptive"})
    assert message["content"] == [
        {"type": "thinking", "thinking": "Rome?", "signature": "unsigned"},
        {"type": "text", "text": "Rome."},
    ]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    hidden = await told(stack, thinking={"type": "adaptive", "display": "omitted"})
    assert hidden["content"] == [{"type": "text", "text": "Rome."}]
    stack.decode[0].script = saying([*words.encode_now("Rome."), EOS], ends=True)
    silent = await told(stack, thinking={"type": "disabled"})
    assert silent["content"] == [{"type": "text", "text": "Rome."}]
    refused = await asked(stack, thinking={"type": "enabled", "budget_tokens": 40})
    assert "thinking.budget_tokens is 40" in error_of(refused, 400, "invalid_request_error")
