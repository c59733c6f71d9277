import json

import pytest

from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import MAX_MODEL_LEN, saying
from testing.router.tokenizers import BOS, EOS
from wire.messages.generation import RequestOutput
from wire.messages.handoff import Ticket

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def chunks_of(stack, *said, **body):
    """The data of all events of a streamed chat, in order, without the end mark."""
    response = await stack.chat(*said, stream=True, **body)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def prompt_of(stack):
    """The text of the last prompt that a server got."""
    return stack.tokenizer.decode(list(stack.decode[0].submitted[-1].token_ids), skip_special_tokens=False)


async def test_a_chat_is_the_templates_prompt_and_its_answer_a_message(make_stack, words):
    stack = await make_stack()
    answer = words.encode_now("this is a test")
    stack.decode[0].script = saying([*answer, EOS], ends=True)
    response = await stack.chat("hello", "world", "and?")
    assert response.status_code == 200, response.text
    body = response.json()
    assert (
        prompt_of(stack) == "<s>user\nhello</s>\n<s>assistant\nworld</s>\n<s>user\nand?</s>\n<s>assistant\n"
    )
    assert stack.decode[0].submitted[0].token_ids[0] == BOS
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "this is a test", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    num_prompt_tokens = len(stack.decode[0].submitted[0].token_ids)
    assert body["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(answer) + 1,
        "total_tokens": num_prompt_tokens + len(answer) + 1,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert (body["object"], body["model"], body["id"][:9]) == ("chat.completion", MODEL, "chatcmpl-")


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_usage(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying([*words.encode_now("wörld 😀"), EOS], ends=True)
    *chunks, last = await chunks_of(stack, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "wörld 😀"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(words.encode_now("wörld 😀")) + 1
    assert {chunk["object"] for chunk in [*chunks, last]} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


async def test_the_choices_of_a_stream_have_a_role_each(make_stack, words):
    stack = await make_stack()

    async def script(submit, send):
        await saying(words.encode_now(f"seed {submit.params.seed}"))(submit, send)

    stack.decode[0].script = script
    found = {0: [], 1: []}
    for chunk in await chunks_of(stack, n=2, seed=7):
        (choice,) = chunk["choices"]
        found[choice["index"]].append(choice["delta"])
    assert [deltas[0]["role"] for deltas in found.values()] == ["assistant"] * 2
    texts = ["".join(delta["content"] for delta in deltas) for deltas in found.values()]
    assert texts == ["seed 7", "seed 8"]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_one_object_a_token_with_its_bytes(make_stack, words, stream):
    stack = await make_stack()
    tokens = words.encode_now("hello 😀")
    stack.decode[0].script = saying(tokens)
    body = {"logprobs": True, "top_logprobs": 2}
    if stream:
        opening, *chunks = await chunks_of(stack, **body)
        assert opening["choices"][0]["logprobs"] is None
        tables = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    else:
        tables = [(await stack.chat(**body)).json()["choices"][0]["logprobs"]]
    content = [entry for table in tables for entry in table["content"]]
    assert [entry["token"] for entry in content] == [words.decode_token(token_id) for token_id in tokens]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "hello 😀"
    assert [entry["logprob"] for entry in content] == [-0.25] * len(tokens)
    best = [{"token": words.decode_token(10 + i), "logprob": -0.5 - i} for i in range(2)]
    for entry in content:
        assert [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]] == best


async def test_log_probabilities_without_alternatives(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    (entry,) = (await stack.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []
    assert (await stack.chat(logprobs=False, top_logprobs=0)).json()["choices"][0]["logprobs"] is None


async def test_an_answer_may_fill_the_context_unless_it_is_told_less(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    asked = [
        {},
        {"max_tokens": 5},
        {"max_completion_tokens": 6},
        {"max_tokens": 7, "max_completion_tokens": 7},
    ]
    for fields in asked:
        assert (await stack.chat(**fields)).status_code == 200
    room = MAX_MODEL_LEN - len(stack.decode[0].submitted[0].token_ids)
    assert [submit.params.max_tokens for submit in stack.decode[0].submitted] == [room, 5, 6, 7]


async def test_sampling_fields_and_stop_strings_work_as_for_completions(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("one, two"))
    fields = {"frequency_penalty": 0.5, "logit_bias": {"7": 5}, "top_k": 3, "user": "someone", "stop": ","}
    answer = (await stack.chat(**fields, store=False, return_token_ids=True)).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("one", ",")
    assert words.decode(choice["token_ids"]) == "one,"
    (submit,) = stack.decode[0].submitted
    assert tuple(answer["prompt_token_ids"]) == submit.token_ids
    params = submit.params
    assert (params.frequency_penalty, params.logit_bias, params.top_k) == (0.5, ((7, 5.0),), 3)


async def test_parts_of_text_are_one_text(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    assert (await stack.chat(messages=[{"role": "user", "content": parts}])).status_code == 200
    assert prompt_of(stack).startswith("<s>user\nhello\nworld</s>")


async def test_tools_reach_the_template_unless_none_may_be_called(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    for choice, told in ((None, True), ("auto", True), ("none", False)):
        assert (await stack.chat(tools=[TOOL], tool_choice=choice)).status_code == 200
        assert prompt_of(stack).startswith(f"<s>tools: {json.dumps([TOOL])}</s>") is told


async def test_a_template_that_reads_the_choice_of_a_tool_gets_it(make_stack):
    template = "{{ tool_choice }} {{ messages[-1].tool_calls[0].function.arguments.x }} {{ deep }}"
    stack = await make_stack(tokenizer_settings={"chat_template": template})
    stack.decode[0].script = saying([300])
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 5}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    fields = {"tools": [TOOL], "tool_choice": "required", "chat_template_kwargs": {"deep": "down"}}
    response = await stack.chat(messages=messages, **fields)
    assert response.status_code == 200, response.text
    assert prompt_of(stack) == "required 5 down"


async def test_without_a_template_there_are_completions_only(make_stack):
    stack = await make_stack(tokenizer_settings={"chat_template": None})
    stack.decode[0].script = saying([300])
    response = await stack.chat()
    assert response.status_code == 400
    assert "has no chat template: use /v1/completions" in response.json()["error"]["message"]
    assert (await stack.complete()).status_code == 200


async def test_the_next_turn_reads_what_the_last_one_left(make_stack, words):
    stack = await make_stack(conversation_return=True)
    answer = (*words.encode_now("world"), EOS)

    async def script(submit, send):
        num_tokens = len(submit.token_ids) + len(answer) - 1
        kept = Ticket("r", 1, 1, stack.decode[0].address, "decode-1", num_tokens, (1,), 1, 30.0)
        send(RequestOutput(submit.request_id, answer, finish_reason="stop", stop_token_id=EOS, ticket=kept))

    stack.decode[0].script = script
    first = (await stack.chat("hello")).json()["choices"][0]["message"]["content"]
    assert (await stack.chat("hello", first, "and?")).status_code == 200
    before, after = stack.prefill[0].requests
    assert before.resume is None
    assert after.resume is not None
    assert after.resume.num_tokens == len(before.token_ids) + len(answer) - 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_chats(make_stack, words, stream):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("world"))
    messages = [{"role": "user", "content": "hello"}]
    made = await stack.openai.chat.completions.create(model=MODEL, messages=messages, stream=stream)
    if stream:
        text = "".join([chunk.choices[0].delta.content async for chunk in made])
    else:
        text = made.choices[0].message.content
    assert text == "world"
