"""Log-probabilities of a completion, and answers that begin with the prompt (`echo`)."""

import pytest

from router.models.tokenizer import Tokenizer
from testing.conditions import until
from testing.router.scripted_router import events_of
from testing.router.scripted_servers import logprobs_of, saying
from wire.errors import TransferError
from wire.messages.generation import RequestOutput, RequestStats


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_only_scored_needs_no_decode_server_and_gives_its_lease_back(
    make_stack, words, stream
):
    stack = await make_stack()
    stack.prefill[0].starts_early = True
    prompt = words.encode_now("hello, world")
    body = {"prompt": "hello, world", "echo": True, "logprobs": 2, "max_tokens": 0}
    if stream:
        answers = await events_of(stack, **body, stream_options={"include_usage": True})
        assert len(answers) == 2
    else:
        answers = [(await stack.complete(**body)).json()]
    choice, usage = answers[0]["choices"][0], answers[-1]["usage"]
    assert (choice["text"], choice["finish_reason"]) == ("hello, world", "length")
    assert choice["logprobs"]["tokens"] == [words.decode_token(token_id) for token_id in prompt]
    assert choice["logprobs"]["token_logprobs"] == [None, *[-0.25] * (len(prompt) - 1)]
    assert choice["logprobs"]["top_logprobs"][1:] == expected_logprobs(words, prompt[1:], 2)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 0)
    (request,) = stack.prefill[0].requests
    await until(lambda: stack.prefill[0].abandoned == [request.request_id])
    assert not stack.decode[0].submitted


async def test_a_prompt_that_is_only_scored_is_scored_again_where_its_first_server_fails(make_stack):
    async def fail(_request):
        raise TransferError("a fault")

    stack = await make_stack(num_prefill=2)
    stack.prefill[0].script = fail
    answer = await stack.complete(prompt="hello world", echo=True, logprobs=0, max_tokens=0)
    assert answer.status_code == 200, answer.text
    assert [len(server.requests) for server in stack.prefill] == [1, 1]
    assert not stack.decode[0].submitted


async def test_a_server_that_runs_prompts_itself_scores_them_too(make_stack, words):
    async def score(submit, send):
        scored = tuple(logprobs_of(token_id, submit.prompt_logprobs) for token_id in submit.token_ids[1:])
        stats = RequestStats(cached_tokens=0)
        send(RequestOutput(submit.request_id, (), None, scored, "length", stats=stats))

    stack = await make_stack(num_prefill=0, role="both")
    stack.decode[0].script = score
    prompt = words.encode_now("hello world")
    answer = await stack.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == [None, *[-0.25] * (len(prompt) - 1)]
    assert stack.decode[0].submitted[0].params.max_tokens == 0


@pytest.mark.parametrize(("prompt", "logprobs"), [("hello", 1), ("hello world", None)])
async def test_what_needs_no_scores_is_answered_without_servers(make_stack, prompt, logprobs):
    stack = await make_stack()
    answer = await stack.complete(prompt=prompt, echo=True, logprobs=logprobs, max_tokens=0)
    choice = answer.json()["choices"][0]
    assert choice["text"] == prompt
    assert choice["logprobs"] is None or choice["logprobs"]["token_logprobs"] == [None]
    assert not stack.decode[0].submitted
    assert not stack.prefill[0].requests


async def test_a_prompt_as_long_as_the_context_can_be_scored(make_stack):
    stack = await make_stack()
    answer = await stack.complete(prompt=[5] * 256, echo=True, logprobs=0, max_tokens=0)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["logprobs"]["token_logprobs"]) == 256
    refused = await stack.complete(prompt=[5] * 257, echo=True, logprobs=0, max_tokens=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
