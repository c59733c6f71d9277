"""Requests exactly as tools for load tests and evaluation send them, and what they read from answers.

Taken from guidellm 0.8.1, aiperf 0.13.0, lm-eval 0.4.13, promptfoo 0.123.1 and k6 1.1.0 (docs/clients.md).
"""

import json
from itertools import accumulate

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import saying

MESSAGES = [{"role": "user", "content": "hello"}]
PER_CHUNK_USAGE = {"include_usage": True, "continuous_usage_stats": True}
NO_KEY = {"Authorization": "Bearer"}
"""lm-eval's header without OPENAI_API_KEY."""
NODE_FETCH = {
    "Accept": "*/*",
    "Accept-Language": "*",
    "Sec-Fetch-Mode": "cors",
    "User-Agent": "node",
    "Authorization": "Bearer none",
}
"""promptfoo's: fetch of Node says ``cors`` as a browser does, but is no page of another origin."""


@pytest.fixture
async def stack(make_stack, words):
    """Each answer is `` this is``."""
    stack = await make_stack()
    stack.decode[0].script = saying(words.encode_now(" this is"))
    return stack


async def asked(stack, path, body, headers=None):
    answer = await stack.client.post(path, json={"model": MODEL} | body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def chunks_of(answer):
    """The objects of a stream; it has to end as all of these tools expect."""
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# --- guidellm --------------------------------------------------------------------------------------


async def test_guidellm_finds_the_router_healthy_and_its_model(stack):
    assert (await stack.client.get("/health")).is_success
    assert (await stack.client.get("/v1/models")).json()["data"][0]["id"] == MODEL


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_guidellm_gets_as_many_tokens_as_it_asks_for_and_usage_that_says_so(stack, words, path, stream):
    num_tokens = len(words.encode_now(" this is"))
    body = {"stop": None, "ignore_eos": True}
    if path == "/v1/completions":
        body |= {"max_tokens": num_tokens, "prompt": "hello"}
    else:
        body |= {"max_completion_tokens": num_tokens, "messages": MESSAGES}
    if stream:
        body |= {"stream": True, "stream_options": PER_CHUNK_USAGE}
    answer = await asked(stack, path, body)
    usages = [chunk["usage"] for chunk in chunks_of(answer)] if stream else [answer.json()["usage"]]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == list(accumulate(counts, max))
    assert counts[-1] == num_tokens
    assert 0 <= usages[-1]["prompt_tokens_details"]["cached_tokens"] < usages[-1]["prompt_tokens"]
    assert stack.decode[0].submitted[0].params.ignore_eos


# --- aiperf ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 8}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 8}),
    ],
)
async def test_aiperf_gets_usage_at_the_end_of_a_stream(stack, words, path, body):
    fields = {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    chunks = chunks_of(await asked(stack, path, body | fields))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(words.encode_now(" this is"))


async def test_aiperf_can_read_the_metrics_that_it_looks_for_beside_the_api(stack):
    names = {
        family.name for family in text_string_to_metric_families((await stack.client.get("/metrics")).text)
    }
    assert "twinfang_requests_in_flight" in names


# --- lm-eval ---------------------------------------------------------------------------------------


async def test_lm_eval_gets_a_log_probability_for_every_token_of_a_batch(stack, words):
    texts = [words.encode_now(text) for text in ("hello, world", "hello")]
    body = {"prompt": texts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = (await asked(stack, "/v1/completions", body, NO_KEY)).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for text, choice in zip(texts, choices, strict=True):
        table = choice["logprobs"]
        # The last entry is the answer's: lm-eval leaves it out, and the first one is part of the context.
        assert len(table["token_logprobs"]) == len(table["top_logprobs"]) > len(text)
        assert all(isinstance(value, float) for value in table["token_logprobs"][1:])
        assert all(max(top.values()) <= 0 for top in table["top_logprobs"][1:])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[5, 6, 7]], "stop": [";", "</s>"]}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stop": [";"]}),
    ],
)
async def test_lm_eval_gets_a_text_up_to_its_stop_strings(stack, path, body):
    fields = {"max_tokens": 8, "temperature": 0.0, "seed": 1234}
    (choice,) = (await asked(stack, path, body | fields, NO_KEY)).json()["choices"]
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == " this is"


# --- promptfoo and k6 ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            {
                "prompt": "hello",
                "max_tokens": 3,
                "temperature": 0,
                "top_p": 1,
                "presence_penalty": 0,
                "frequency_penalty": 0,
                "best_of": 1,
                "stop": ["<|im_end|>", "<|endoftext|>"],
            },
        ),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}),
    ],
)
async def test_promptfoo_gets_text_and_usage_by_node_s_fetch(stack, path, body):
    answer = (await asked(stack, path, body, NODE_FETCH)).json()
    (choice,) = answer["choices"]
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == " this is"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_k6_gets_a_whole_stream_as_one_body(stack):
    body = {"messages": MESSAGES, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "User-Agent": "k6/1.1.0 (https://k6.io/)"}
    chunks = chunks_of(await asked(stack, "/v1/chat/completions", body, headers))
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [end for end in ends if end] == ["length"]
