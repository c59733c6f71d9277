"""Each request that can't be served gets a clear 4xx, and the next one is served."""

import asyncio
import json

import pytest

from router.api.openai.chat import ChatBody
from router.api.openai.completions import CompletionBody
from router.api.openai.tokenization import DetokenizeBody, TokenizeBody
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import MODEL, why_not_ready
from testing.router.scripted_servers import MAX_MODEL_LEN, VOCAB_SIZE, saying

INVALID = {"invalid_value", "invalid_grammar", "context_length_exceeded", "model_not_found"}

BAD_FIELDS = [
    ({"model": "another"}, 404, "model", "another"),
    ({"model": 5}, 400, "model", "valid string"),
    ({"prompt": None}, 400, "prompt", "empty"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": [[]]}, 400, "prompt", "empty"),
    ({"prompt": [""]}, 400, "prompt", "empty"),
    ({"prompt": ["a", ""]}, 400, "prompt", "none of them empty"),
    ({"prompt": {"text": "a"}}, 400, "prompt", "list of"),
    ({"prompt": 5}, 400, "prompt", "5"),
    ({"prompt": True}, 400, "prompt", "True"),
    ({"prompt": [1, "a"]}, 400, "prompt", "list of"),
    ({"prompt": ["a", 1]}, 400, "prompt", "list of"),
    ({"prompt": [[1], "a"]}, 400, "prompt", "list of"),
    ({"prompt": [[1], 1]}, 400, "prompt", "list of"),
    ({"prompt": [1.5]}, 400, "prompt", "list of"),
    ({"prompt": [True]}, 400, "prompt", "list of"),
    ({"prompt": [[[1]]]}, 400, "prompt", "list of"),
    ({"prompt": [VOCAB_SIZE]}, 400, "prompt", f"between 0 and {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
    ({"prompt": [5, -1]}, 400, "prompt", "got -1"),
    ({"prompt": [10**30]}, 400, "prompt", "got 1000"),
    ({"prompt": [[5], [10**30]]}, 400, "prompt", "got 1000"),
    ({"prompt": [5] * MAX_MODEL_LEN}, 400, "prompt", f"{MAX_MODEL_LEN} tokens"),
    ({"prompt": [5] * 5000}, 400, "prompt", "shorten the prompt"),
    ({"prompt": "word " * 5000}, 400, "prompt", "shorten"),
    ({"prompt": "w" * 1_000_000}, 400, "prompt", "1000000 characters"),
    (
        {"prompt": ["a"] * 513},
        400,
        "prompt",
        "limit is 512: send fewer at a time, or raise the router's --max-choices",
    ),
    ({"prompt": ["a"] * 100, "n": 100}, 400, "prompt", "10000 choices"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1, or 0 with echo: true, got 0"),
    ({"max_tokens": -5}, 400, "max_tokens", "got -5"),
    ({"max_tokens": -1, "echo": True}, 400, "max_tokens", "at least 0 with echo: true, got -1"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "valid integer"),
    ({"max_tokens": "16"}, 400, "max_tokens", "valid integer"),
    ({"max_tokens": True}, 400, "max_tokens", "valid integer"),
    ({"max_tokens": MAX_MODEL_LEN + 1}, 400, "max_tokens", "maximum context length"),
    ({"max_tokens": 10**30}, 400, "max_tokens", "10000"),
    ({"n": 0}, 400, "n", "between 1 and 128, got 0"),
    ({"n": -1}, 400, "n", "got -1"),
    ({"n": 129}, 400, "n", "got 129"),
    ({"n": 10**40}, 400, "n", "got 1000"),
    ({"n": 2, "best_of": 3}, 400, "best_of", "equals n"),
    ({"max_tokens": 6, "max_completion_tokens": 5}, 400, "max_completion_tokens", "got 5"),
    ({"best_of": 2}, 400, "best_of", "got 2"),
    ({"suffix": "end"}, 400, "suffix", "not supported"),
    ({"temperature": -0.1}, 400, "temperature", "-0.1"),
    ({"temperature": "hot"}, 400, "temperature", "valid number"),
    ({"temperature": 1e5}, 400, "temperature", "100000"),
    ({"top_p": 0}, 400, "top_p", "more than 0"),
    ({"top_p": 1.01}, 400, "top_p", "1.01"),
    ({"top_k": -2}, 400, "top_k", "got -2"),
    ({"top_k": 10**30}, 400, "top_k", "10000"),
    ({"min_p": 1.5}, 400, "min_p", "1.5"),
    ({"repetition_penalty": 0}, 400, "repetition_penalty", "between 0.01 and 100.0, got 0"),
    ({"repetition_penalty": 1e-40}, 400, "repetition_penalty", "between 0.01 and 100.0, got 1e-40"),
    ({"repetition_penalty": 101}, 400, "repetition_penalty", "between 0.01 and 100.0, got 101"),
    ({"presence_penalty": 2.5}, 400, "presence_penalty", "2.5"),
    ({"frequency_penalty": -2.5}, 400, "frequency_penalty", "-2.5"),
    ({"seed": 1 << 63}, 400, "seed", str(1 << 63)),
    ({"seed": "lucky"}, 400, "seed", "valid integer"),
    ({"logprobs": 21}, 400, "logprobs", "between 0 and 20"),
    ({"logprobs": -1}, 400, "logprobs", "got -1"),
    ({"logprobs": True}, 400, "logprobs", "valid integer"),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias", "101"),
    ({"logit_bias": {"five": 1}}, 400, "logit_bias", "'five'"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, 400, "logit_bias", str(VOCAB_SIZE)),
    ({"logit_bias": {"-1": 1}}, 400, "logit_bias", "-1"),
    ({"logit_bias": {"5": "x"}}, 400, "logit_bias", "valid number"),
    ({"logit_bias": [5]}, 400, "logit_bias", "an object"),
    ({"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias", "token ids"),
    ({"stop": ""}, 400, "stop", "at least 1 character, got 0"),
    ({"stop": ["a", ""]}, 400, "stop", "got 0"),
    ({"stop": 5}, 400, "stop", "valid string"),
    ({"stop": [5]}, 400, "stop", "valid string"),
    ({"stop": ["a"] * 65}, 400, "stop", "has 65 strings, the limit is 64"),
    ({"stop": "a" * 1025}, 400, "stop", "1025"),
    ({"stop_token_ids": [VOCAB_SIZE]}, 400, "stop_token_ids", str(VOCAB_SIZE)),
    ({"stop_token_ids": [-1]}, 400, "stop_token_ids", "-1"),
    ({"stop_token_ids": [10**30]}, 400, "stop_token_ids", "1000"),
    ({"stop_token_ids": 5}, 400, "stop_token_ids", "valid array"),
    ({"min_tokens": -1}, 400, "min_tokens", "-1"),
    ({"min_tokens": 17}, 400, "min_tokens", "between 0 and 16, got 17"),
    ({"stream": "yes"}, 400, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, 400, "stream_options", "valid boolean"),
    ({"echo": 1}, 400, "echo", "valid boolean"),
    ({"speculate": "no"}, 400, "speculate", "valid boolean"),
    ({"speculate": 0}, 400, "speculate", "valid boolean"),
    ({"ignore_eos": "no"}, 400, "ignore_eos", "valid boolean"),
    ({"user": 5}, 400, "user", "valid string"),
    ({"use_beam_search": True}, 400, "use_beam_search", "not supported"),
    ({"response_format": "json_object"}, 400, "response_format", "an object"),
    ({"guided_regex": "a("}, 400, "guided_regex", "unclosed group"),
    ({"guided_regex": ""}, 400, "guided_regex", "not empty"),
    ({"guided_choice": []}, 400, "guided_choice", "at least 1 string, got []"),
    ({"guided_choice": ["a", ""]}, 400, "guided_choice", "not empty"),
    ({"guided_json": "{"}, 400, "guided_json", "is no JSON"),
    ({"guided_json": '"x"'}, 400, "guided_json", "must be an object, got 'x'"),
    ({"guided_grammar": "start: other"}, 400, "guided_grammar", "other"),
    ({"structured_outputs": {"tag": "x"}}, 400, "structured_outputs", "just one of json"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, 400, "structured_outputs", "just one of json"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice", "give one of them"),
    ({"guided_regex": "a", "ignore_eos": True}, 400, "ignore_eos", "grammar"),
    ({"guided_choice": ["a" * 140_000]}, 400, "guided_choice", "the limit is 131072"),
    ({"truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens", "not supported"),
]

USER = {"role": "user", "content": "a"}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def schema(said):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": said}}


def allowing(mode, tools):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return {"tools": TOOLS, "tool_choice": choice}


def assistant_calls(calls):
    return {"messages": [USER, {"role": "assistant", "tool_calls": calls}]}


BAD_CHAT_FIELDS = [
    ({"model": "another"}, 404, "model", "another"),
    ({"messages": None}, 400, "messages", "at least one message, got None"),
    ({"messages": []}, 400, "messages", "at least one message"),
    ({"messages": "hello"}, 400, "messages", "got 'hello'"),
    ({"messages": [USER, "b"]}, 400, "messages", "messages[1] must be an object, got 'b'"),
    ({"messages": [{"content": "a"}]}, 400, "messages", "messages[0].role must be a string"),
    ({"messages": [{"role": "user"}]}, 400, "messages", "messages[0].content must be"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages", "got 5"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, 400, "messages", "content[0] is 'a'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages",
        "messages[0].content[0] is 'image_url', but the model takes text only",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages", "[0].text must be"),
    ({"messages": [{"role": "nobody", "content": ""}]}, 400, "messages", "nobody may not speak"),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, 400, "messages", "shorten the messages"),
    ({"messages": [{"role": "user", "content": "w" * 10**6}]}, 400, "messages", "characters"),
    (assistant_calls(5), 400, "messages", "messages[1].tool_calls must be a list"),
    (assistant_calls([{"type": "function"}]), 400, "messages", "tool_calls[0].function must be an object"),
    (
        assistant_calls([{"function": {"name": "look", "arguments": "{"}}]),
        400,
        "messages",
        "tool_calls[0].function.arguments is not valid JSON",
    ),
    (assistant_calls([{"function": {"name": "f", "arguments": '"\\ud800"'}}]), 400, "messages", "JSON"),
    (
        assistant_calls([{"function": {"name": "f", "arguments": "[" * 10**5}}]),
        400,
        "messages",
        "limit is 128",
    ),
    ({"tools": {}}, 400, "tools", "must be a list"),
    ({"tools": ["look"]}, 400, "tools", "tools[0] must be an object of type 'function'"),
    ({"tools": [{"type": "function"}]}, 400, "tools", "tools[0].function must be an object with a name"),
    ({"tool_choice": "maybe"}, 400, "tool_choice", "got 'maybe'"),
    ({"tool_choice": 5}, 400, "tool_choice", "got 5"),
    ({"tool_choice": "required"}, 400, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, 400, "tool_choice", "none of the tools"),
    (allowing("auto", []), 400, "tool_choice", "allowed_tools.tools must be a list of functions"),
    (allowing("auto", ["look"]), 400, "tool_choice", "allowed_tools.tools must be a list of functions"),
    (allowing("auto", [{"type": "function", "function": {"name": "b"}}]), 400, "tool_choice", "names 'b'"),
    (allowing("none", TOOLS), 400, "tool_choice", "mode must be 'auto' or 'required', got 'none'"),
    (allowing("required", TOOLS) | {"tools": None}, 400, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, 400, "tool_choice", "mode must be"),
    ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, 400, "tool_choice", "allowed_tools"),
    ({"best_of": 2}, 400, "best_of", "not supported"),
    ({"suffix": "end"}, 400, "suffix", "not supported"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "a field of its own"),
    ({"chat_template_kwargs": {"self": 1}, "messages": [5]}, 400, "messages", "an object, got 5"),
    ({"max_tokens": 0}, 400, "max_tokens", "at least 1, got 0"),
    ({"max_completion_tokens": -1}, 400, "max_completion_tokens", "at least 1, got -1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens", "give one of them"),
    ({"max_completion_tokens": MAX_MODEL_LEN}, 400, "max_completion_tokens", "max_completion_tokens or"),
    ({"logprobs": 5}, 400, "logprobs", "valid boolean"),
    ({"top_logprobs": 5}, 400, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "between 0 and 20, got 21"),
    ({"n": 0}, 400, "n", "between 1 and 128"),
    ({"stop": ""}, 400, "stop", "got 0"),
    ({"temperature": -1}, 400, "temperature", "-1"),
    ({"response_format": {"type": "json"}}, 400, "response_format", "'json_schema', got 'json'"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format", "an object with a schema"),
    ({"response_format": schema(["x"])}, 400, "response_format", "the schema must be an object"),
    ({"response_format": schema({"type": "strin"})}, 400, "response_format", "Invalid type: strin"),
    ({"response_format": schema({"not": {}})}, 400, "response_format", 'Unimplemented keys: ["not"]'),
    ({"response_format": schema(False)}, 400, "response_format", "the schema must be an object"),
    ({"response_format": schema({"enum": []})}, 400, "response_format", "Unsatisfiable"),
    (
        {"response_format": schema({"not": {}, "x-guidance": {"lenient": True}})},
        400,
        "response_format",
        "not",
    ),
    ({"functions": [{"name": "look"}]}, 400, "functions", "not supported"),
    ({"modalities": ["text", "audio"]}, 400, "modalities", "not supported"),
    ({"continue_final_message": True}, 400, "continue_final_message", "not supported"),
    ({"chat_template": "{{ 1 }}"}, 400, "chat_template", "not supported"),
]

BAD_BODIES = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b'{"prompt": "a",}', "not valid JSON"),
    (b"null", "JSON object"),
    (b"[]", "JSON object"),
    (b'"prompt"', "JSON object"),
    (b'{"prompt": "\xff\xfe"}', "UTF-8"),
    (b'{"prompt": "\\ud800"}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "finite number"),
    (b'{"prompt": "a", "temperature": Infinity}', "finite number"),
    (b'{"prompt": "a", "temperature": 1e999}', "finite number"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b'{"prompt": ' + b"[" * 100_000, "within one another, the limit is 128"),
]


def check_error(response, status: int, param: str | None, part: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert part in error["message"]
    assert len(error["message"]) < 700
    assert "Traceback" not in response.text


async def test_every_bad_field_is_named_and_the_next_request_served(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    for fields, status, param, part in BAD_FIELDS:
        for stream in (False, True) if "stream" not in fields and "stream_options" not in fields else (None,):
            extra = {} if stream is None else {"stream": stream}
            response = await stack.complete(**extra, **fields)
            check_error(response, status, param, part)
            assert response.json()["error"]["code"] in INVALID
        assert (await stack.complete()).status_code == 200, f"after {fields}"
    assert stack.gate.num_in_flight == 0


async def test_every_bad_field_of_a_chat_is_named_and_the_next_chat_served(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    for fields, status, param, part in BAD_CHAT_FIELDS:
        response = await stack.chat(**fields)
        check_error(response, status, param, part)
        assert response.json()["error"]["code"] in INVALID
        check_error(await stack.chat(stream=True, **fields), status, param, part)
    assert (await stack.chat()).status_code == 200
    assert stack.gate.num_in_flight == 0


async def test_every_field_of_a_wrong_type_is_named(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    chat = {"messages": [{"role": "user", "content": "a"}]}
    endpoints = {
        "/v1/completions": (CompletionBody, {"prompt": "a"}),
        "/v1/chat/completions": (ChatBody, chat),
        "/tokenize": (TokenizeBody, chat),
        "/detokenize": (DetokenizeBody, {"tokens": [5]}),
    }
    for path, (kind, given) in endpoints.items():
        for field in kind.model_fields:
            refused = []
            for wrong in ("wrong", 1.5, [[{}]], {"a": {}}):
                body = ({} if field == "prompt" else given) | {field: wrong}
                answer = await stack.client.post(path, json=body)
                if answer.status_code != 200:
                    refused.append(error := answer.json()["error"])
                    assert error["param"] == field, (path, field, error)
                    assert field in error["message"], (path, field, error)
            assert refused, (path, field)


async def test_every_bad_body_is_refused_and_the_next_request_served(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    for body, part in BAD_BODIES:
        response = await stack.client.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        param = "temperature" if b"temperature" in body else None
        check_error(response, 400, param, part)
        assert (await stack.complete()).status_code == 200
    form = await stack.client.post("/v1/completions", data={"prompt": "a"})
    check_error(form, 400, None, "application/json")


async def test_harmless_values_of_unsupported_fields_are_accepted(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    harmless = {"use_beam_search": False, "suffix": "", "response_format": {"type": "text"}, "bad_words": []}
    assert (await stack.complete(**harmless)).status_code == 200


async def test_unknown_routes_and_methods_answer_in_openai_s_form(make_stack):
    stack = await make_stack()
    check_error(await stack.client.get("/v1/nothing"), 404, None, "GET /v1/nothing")
    check_error(await stack.client.get("/"), 404, None, "GET /")
    response = await stack.client.get("/v1/completions")
    check_error(response, 405, None, "GET is not allowed")
    assert response.headers["allow"] == "POST"
    check_error(await stack.client.get("/v1/models/another"), 404, "model", "another")


async def test_a_body_that_is_declared_too_large_is_refused_unread(make_stack):
    stack = await make_stack(max_body_bytes=10_000)
    stack.decode[0].script = saying([300])
    response = await stack.complete(prompt="a" * 20_000)
    check_error(response, 413, None, "the limit is 10000")
    assert response.json()["error"]["code"] == "body_too_large"

    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: 50000000\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), TIMEOUT_S)
    assert b"413" in answer
    writer.close()
    assert (await stack.complete()).status_code == 200


async def test_a_chunked_body_is_refused_once_it_is_too_large(make_stack):
    stack = await make_stack(max_body_bytes=100_000)
    stack.decode[0].script = saying([300])

    async def endless():
        for _ in range(1000):
            yield b"x" * 10_000
            await asyncio.sleep(0)

    response = await stack.client.post(
        "/v1/completions", content=endless(), headers={"Content-Type": "application/json"}
    )
    check_error(response, 413, None, "more than 100000 bytes")
    assert "raise the router's --max-body-size" in response.json()["error"]["message"]
    assert (await stack.complete()).status_code == 200


async def test_a_chunked_body_of_allowed_size_is_read(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])

    async def pieces():
        for byte in json.dumps({"model": MODEL, "prompt": "hello"}).encode():
            yield bytes([byte])

    response = await stack.client.post(
        "/v1/completions", content=pieces(), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 200


async def test_a_client_that_leaves_while_sending_its_body_does_no_harm(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    host, port = stack.url.removeprefix("http://").split(":")
    for head in (b"", b"Content-Length: 100\r\n\r\n{", b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pr'):
        _reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n" + head
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await stack.complete()).status_code == 200


async def test_an_unexpected_exception_is_a_500_without_internals(make_stack, monkeypatch):
    stack = await make_stack()
    stack.decode[0].script = saying([300])

    async def broken(*_args, **_kwargs):
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(stack.tokenizer, "encode", broken)
        response = await stack.complete()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"]
    assert "secret" not in response.text
    assert (await stack.complete()).status_code == 200


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_no_server_is_a_503_that_says_what_is_missing(make_stack, num_prefill):
    stack = await make_stack(num_prefill=num_prefill, ready=num_prefill > 0)
    if num_prefill:
        await stack.prefill[0].stop()
        await until(lambda: "no prefill server is connected" in why_not_ready(stack))
    else:
        await until(lambda: "there is no prefill server" in why_not_ready(stack))
    for stream in (False, True):
        response = await stack.complete(stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "no prefill server" in response.json()["error"]["message"]
