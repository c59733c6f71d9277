"""The ``openai`` Python client completes and streams against a real stack."""

import json

import jsonschema
import openai
import pytest


@pytest.fixture
async def client(stacks):
    stack = stacks("up", "--max-num-seqs", "16")
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as made:
        yield made


async def test_it_completes(client):
    models = await client.models.list()
    model = models.data[0].id
    completion = await client.completions.create(
        model=model, prompt=["import ", "def f("], max_tokens=12, temperature=0, logprobs=2, n=2
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.choices[0].text == completion.choices[1].text
    assert len(completion.choices[0].logprobs.tokens) == 12
    assert completion.usage.completion_tokens == 48


async def test_it_streams_the_same_text(client):
    fields = {"model": (await client.models.list()).data[0].id, "prompt": "class ", "max_tokens": 40}
    whole = await client.completions.create(**fields, temperature=0)
    pieces = []
    usage = None
    async for event in await client.completions.create(
        **fields, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        pieces += [choice.text for choice in event.choices]
        usage = event.usage or usage
    assert "".join(pieces) == whole.choices[0].text
    assert usage == whole.usage


async def test_echo_with_logprobs_scores_prompt_and_answer(client):
    fields = {"model": (await client.models.list()).data[0].id, "temperature": 0, "logprobs": 1}
    prompt = "def main(argv):\n    return"
    echoed = await client.completions.create(**fields, prompt=prompt, max_tokens=4, echo=True)
    choice = echoed.choices[0]
    assert choice.text.startswith(prompt)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    scored = await client.completions.create(**fields, prompt=prompt, max_tokens=0, echo=True)
    assert (scored.choices[0].text, scored.choices[0].finish_reason) == (prompt, "length")
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (echoed.usage.prompt_tokens, 0)
    expected = choice.logprobs.token_logprobs[: scored.usage.prompt_tokens]
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_seed_repeats_an_answer_and_another_seed_does_not(client):
    fields = {"model": (await client.models.list()).data[0].id, "prompt": "import ", "max_tokens": 24}

    async def sample(seed):
        completion = await client.completions.create(**fields, temperature=1.0, seed=seed)
        return completion.choices[0].text

    assert await sample(1) == await sample(1)
    assert await sample(1) != await sample(2)


async def test_an_error_reaches_the_client_as_its_own_class(client):
    with pytest.raises(openai.NotFoundError, match="nobody"):
        await client.completions.create(model="nobody", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await client.completions.create(
            model=(await client.models.list()).data[0].id, prompt="a", max_tokens=0
        )


CHAT = [{"role": "user", "content": "What is 3 + 4?"}]


async def test_a_chat_is_the_completion_of_its_template(client):
    model = (await client.models.list()).data[0].id
    fields = {"model": model, "max_tokens": 12, "temperature": 0}
    chat = await client.chat.completions.create(**fields, messages=CHAT, logprobs=True, top_logprobs=2)
    text = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    completion = await client.completions.create(**fields, prompt=text)
    (choice,) = chat.choices
    assert (choice.message.role, choice.message.content) == ("assistant", completion.choices[0].text)
    assert choice.finish_reason == completion.choices[0].finish_reason
    assert chat.usage.prompt_tokens == completion.usage.prompt_tokens
    assert chat.usage.completion_tokens == len(choice.logprobs.content)
    spoken = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert spoken.decode().removesuffix("<|im_end|>") == choice.message.content
    assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content)


async def test_a_chat_streams_its_choices(client):
    model = (await client.models.list()).data[0].id
    fields = {"model": model, "messages": CHAT, "n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 16}
    whole = await client.chat.completions.create(**fields)
    texts, reasons = ["", ""], [None, None]
    async for event in await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        for choice in event.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert event.usage.completion_tokens == whole.usage.completion_tokens
    assert event.usage.prompt_tokens == whole.usage.prompt_tokens  # the second time more of them are cached


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}, "note": {"enum": ["a", "b"]}},
    "required": ["x", "note"],
    "additionalProperties": False,
}


async def test_an_answer_is_json_of_the_schema(client):
    fields = {
        "model": (await client.models.list()).data[0].id,
        "max_tokens": 200,
        "temperature": 1,
        "seed": 3,
    }
    fields["messages"] = [{"role": "user", "content": "a point, please"}]
    fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    whole = await client.chat.completions.create(**fields)
    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), POINT)
    stream = await client.chat.completions.create(**fields, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == choice.message.content
    for schema, words in [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#"}, "can't be followed"),  # nothing that ends: only the decode server finds out
    ]:
        fields["response_format"]["json_schema"]["schema"] = schema
        with pytest.raises(openai.BadRequestError, match=words):
            await client.chat.completions.create(**fields)


async def test_a_tool_that_must_be_called_is_called(client):
    tools = [{"type": "function", "function": {"name": "draw", "parameters": POINT}}]
    fields = {"model": (await client.models.list()).data[0].id, "max_tokens": 200, "temperature": 0}
    fields |= {"messages": [{"role": "user", "content": "draw"}], "tools": tools}
    fields["tool_choice"] = {"type": "function", "function": {"name": "draw"}}
    (choice,) = (await client.chat.completions.create(**fields)).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.function.name == "draw"
    jsonschema.validate(json.loads(call.function.arguments), POINT)
    stream = await client.chat.completions.create(**fields, stream=True)
    streamed = [one async for chunk in stream for one in chunk.choices[0].delta.tool_calls or ()]
    assert [one.function.name for one in streamed if one.id] == ["draw"]
    assert len(streamed) > 1  # on a busy machine, tokens come together
    assert "".join(one.function.arguments for one in streamed) == call.function.arguments
