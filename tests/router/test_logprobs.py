"""Log-probabilities of a completion, and its prompt put before it."""

import pytest

from router.tokenizer import Tokenizer
from tests.router.conftest import events_of
from tests.router.scripted_servers import saying


def expected_logprobs(words: Tokenizer, token_ids: list[int], num_top: int) -> list[dict[str, float]]:
    return [
        {words.decode_token(token_id): -0.25} | {words.decode_token(10 + i): -0.5 - i for i in range(num_top)}
        for token_id in token_ids
    ]


@pytest.mark.parametrize("num_top", [0, 3])
async def test_logprobs_come_as_four_parallel_lists(make_stack, words, num_top):
    stack = await make_stack()
    tokens = words.encode_now(" world 😀")
    stack.decode[0].script = saying(tokens)
    choice = (await stack.complete(logprobs=num_top)).json()["choices"][0]
    table = choice["logprobs"]
    assert table["tokens"] == [words.decode_token(token_id) for token_id in tokens]
    assert table["token_logprobs"] == [-0.25] * len(tokens)
    assert table["top_logprobs"] == expected_logprobs(words, tokens, num_top)
    for token, offset in zip(table["tokens"], table["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_answer_with_its_logprobs(make_stack, words, stream):
    stack = await make_stack()
    prompt, tokens = words.encode_now("hello, world"), words.encode_now(" this is")
    stack.decode[0].script = saying(tokens)
    body = {"prompt": "hello, world", "echo": True, "logprobs": 2}
    if stream:
        choices = [chunk["choices"][0] for chunk in await events_of(stack, **body)]
    else:
        choices = (await stack.complete(**body)).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    assert text == "hello, world this is"
    table = {
        name: [item for choice in choices for item in choice["logprobs"][name]]
        for name in choices[0]["logprobs"]
    }
    assert table["tokens"] == [words.decode_token(token_id) for token_id in [*prompt, *tokens]]
    assert table["token_logprobs"] == [None, *[-0.25] * (len(prompt) + len(tokens) - 1)]
    assert table["top_logprobs"][0] is None
    assert table["top_logprobs"][1:] == expected_logprobs(words, [*prompt, *tokens][1:], 2)
    for token, offset in zip(table["tokens"], table["text_offset"], strict=True):
        assert text[offset:].startswith(token)


async def test_echo_of_a_single_token_has_nothing_to_look_up(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("!"))
    choice = (await stack.complete(prompt="hello", echo=True, logprobs=1)).json()["choices"][0]
    assert choice["text"] == "hello!"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert choice["logprobs"]["text_offset"] == [0, 5]


async def test_echo_of_token_ids_is_their_text(make_stack, words):
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now("!"))
    answer = await stack.complete(prompt=words.encode_now("hello world"), echo=True)
    assert answer.json()["choices"][0]["text"] == "hello world!"
