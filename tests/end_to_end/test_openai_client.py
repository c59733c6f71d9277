"""The ``openai`` Python client completes and streams against a real stack."""

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
