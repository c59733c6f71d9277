"""Limits of API keys over HTTP: what is refused and how, what answers say is left, and what is counted."""

import asyncio
import calendar
import time

import pytest
from anthropic import AsyncAnthropic
from anthropic import RateLimitError as AnthropicRateLimitError
from openai import AsyncOpenAI, RateLimitError

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.access.key_limits import KeyLimits
from router.quota.rate_headers import duration
from testing.conditions import until
from testing.router.scripted_router import MODEL, samples_of
from testing.router.scripted_servers import failing, hanging, saying, server_info
from wire.errors import TransferError, UnavailableError
from wire.messages.generation import RequestOutput, RequestStats

KEY = new_key()
AUTH = {"Authorization": f"Bearer {KEY}"}
BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
}
NO_ROOM = "tokens_total"


@pytest.fixture
async def limited(make_stack, tmp_path):
    """Returns a function that makes a stack whose only key has these limits."""

    async def make(script=None, num_decode=1, **limits):
        path = tmp_path / "keys"
        path.write_text(key_line(ApiKey("alice", digest_of(KEY), limits=KeyLimits(**limits), role="view")))
        stack = await make_stack(num_decode=num_decode, api_keys_file=path)
        stack.client.headers.update(AUTH)
        for server in stack.decode:
            server.script = script or saying([300, 301, 302])
        return stack

    return make


async def post(stack, path, **body):
    return await stack.client.post(path, json={"model": MODEL, **BODIES[path], **body})


def account(stack):
    """Returns the key's account."""
    return stack.services.quota.limiter._store._accounts["alice"]


async def settled(stack):
    """Returns how many tokens the key has used, once nothing is reserved."""
    await until(lambda: account(stack).reserved == 0)
    return account(stack).used_total


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_answers_say_what_is_left_and_count_what_they_used(limited, path, stream):
    stack = await limited(requests_per_minute=2, tokens_per_minute=600)
    response = await post(stack, path, stream=stream)
    assert response.status_code == 200
    reserved = 600 - remaining(response, path, "tokens")
    assert reserved >= 4
    assert remaining(response, path, "requests") == 1
    used = await settled(stack)
    assert 4 <= used <= reserved
    if not stream:
        usage = response.json()["usage"]
        counted = [
            usage.get(name, 0) for name in ("input_tokens", "cache_read_input_tokens", "output_tokens")
        ]
        assert used == usage.get("total_tokens", sum(counted))
    await post(stack, path)
    refused = await post(stack, path, stream=stream)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 30
    assert remaining(refused, path, "requests") == 0
    assert await settled(stack) == 2 * used
    samples = await samples_of(stack)
    assert samples["twinfang_key_limit_refusals_total", "alice", "requests_per_minute"] == 1
    assert samples["twinfang_request_errors_total", "rate_limit_exceeded"] == 1
    assert samples["twinfang_key_requests_total", "alice", "refused"] == 1


def remaining(response, path, of):
    headers = response.headers
    if path == "/v1/messages":
        limit = headers[f"anthropic-ratelimit-{of}-limit"]
        at = calendar.timegm(time.strptime(headers[f"anthropic-ratelimit-{of}-reset"], "%Y-%m-%dT%H:%M:%SZ"))
        assert time.time() - 60 < at < time.time() + 61
        left = headers[f"anthropic-ratelimit-{of}-remaining"]
    else:
        limit, left = headers[f"x-ratelimit-limit-{of}"], headers[f"x-ratelimit-remaining-{of}"]
        assert headers[f"x-ratelimit-reset-{of}"].endswith("s")
    assert int(limit) == {"requests": 2, "tokens": 600}[of]
    return int(left)


async def test_a_key_without_limits_has_no_headers_and_asks_no_store(limited):
    stack = await limited()
    response = await post(stack, "/v1/completions")
    assert not [name for name in response.headers if "ratelimit" in name]
    assert not stack.services.quota.limiter._store._accounts


async def test_clients_understand_refusals(limited):
    stack = await limited(requests_per_minute=1, tokens_total=200)
    url = stack.url
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as openai,
        AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as anthropic,
    ):
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        await openai.chat.completions.create(**asked, max_tokens=3)
        with pytest.raises(RateLimitError, match="requests_per_minute=1") as rate:
            await openai.chat.completions.create(**asked, max_tokens=3)
        assert rate.value.code == "rate_limit_exceeded"
        with pytest.raises(AnthropicRateLimitError, match="requests_per_minute=1"):
            await anthropic.messages.create(**asked, max_tokens=3)
        with pytest.raises(RateLimitError, match="tokens_total=200") as budget:
            await openai.chat.completions.create(**asked, max_tokens=175)
        assert (budget.value.code, budget.value.type) == ("insufficient_quota", "insufficient_quota")
        assert budget.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("limits", "body", "code", "part", "retries"),
    [
        ({"tokens_per_minute": 10}, {"max_tokens": 50}, "rate_limit_exceeded", "shorten the prompt", None),
        ({"tokens_per_day": 10}, {"max_tokens": 50}, "rate_limit_exceeded", "tokens_per_day=10", None),
        ({"tokens_per_minute": 9}, {}, "rate_limit_exceeded", "6 of them are in use", range(1, 61)),
        ({"tokens_per_day": 9}, {}, "insufficient_quota", "6 tokens are used today", range(1, 86401)),
        ({"tokens_per_month": 9}, {}, "insufficient_quota", "send it after 20", range(1, 32 * 86400)),
        ({"tokens_total": 9}, {}, "insufficient_quota", "6 tokens are used in all", None),
    ],
)
async def test_a_refusal_names_value_limit_and_remedy(limited, limits, body, code, part, retries):
    stack = await limited(**limits)
    text = {"prompt": [1, 2, 3]}
    if not body:
        assert (await post(stack, "/v1/completions", **text)).status_code == 200
        assert await settled(stack) == 6
    response = await post(stack, "/v1/completions", **text, **body)
    assert response.status_code == 429
    error = response.json()["error"]
    assert error["code"] == code
    assert part in error["message"]
    assert "ask the operator" in error["message"]
    given = response.headers.get("Retry-After")
    assert given is None if retries is None else int(given) in retries


async def test_what_running_requests_reserve_is_not_given_twice(limited):
    stack = await limited(hanging, tokens_total=100)
    running = asyncio.create_task(post(stack, "/v1/completions", prompt=[1, 2, 3], max_tokens=90))
    await until(lambda: stack.decode[0].submitted)
    refused = await post(stack, "/v1/completions", prompt=[1, 2, 3], max_tokens=90)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded", "it may be taken soon"
    assert refused.headers["Retry-After"] == "1"
    running.cancel()
    await until(lambda: account(stack).reserved == 0)
    assert account(stack).used_total == 3 + 1, "the client went away after one token"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_failed_over_counts_once(limited, stream):
    stack = await limited(num_decode=2, tokens_total=1000)
    await until(lambda: stack.services.pool.num_connected()["decode"] == 2)
    broken = failing(UnavailableError("it is gone"), after=(300, 301))
    stack.decode[0].script = stack.decode[1].script = first(broken, saying([302]))
    response = await post(stack, "/v1/completions", prompt=[1, 2, 3], stream=stream)
    assert response.status_code == 200
    assert len(stack.decode[0].submitted) + len(stack.decode[1].submitted) == 2
    assert await settled(stack) == 3 + 3


def first(one, then):
    asked = []

    async def script(submit, send):
        asked.append(submit)
        await (one if len(asked) == 1 else then)(submit, send)

    return script


async def test_an_answer_that_fails_before_its_first_token_costs_nothing(limited):
    stack = await limited(failing(TransferError("no state")), tokens_total=1000)
    response = await post(stack, "/v1/completions")
    assert response.status_code >= 500
    assert await settled(stack) == 0


async def test_a_request_that_leaves_the_queue_costs_nothing(limited):
    stack = await limited(hanging, tokens_total=1000)
    stack.services.settings.change({"max_requests_in_flight": 1})
    running = asyncio.create_task(post(stack, "/v1/completions", prompt=[1, 2, 3], max_tokens=50))
    await until(lambda: stack.decode[0].submitted)
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 50, "stream": True}
    late = await stack.client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.1"})
    assert late.status_code == 504
    await until(lambda: account(stack).reserved == 53)
    assert account(stack).used_total == 0
    running.cancel()


async def test_a_stream_whose_client_goes_away_counts_what_was_generated(limited):
    stack = await limited(hanging, tokens_total=1000)
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 90, "stream": True}
    async with stack.client.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_bytes())
    assert await settled(stack) == 3 + 1


async def test_each_choice_counts_and_each_prompt_once(limited):
    stack = await limited(tokens_total=1000)
    body = {"prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 3}
    response = await post(stack, "/v1/completions", **body)
    assert response.json()["usage"]["total_tokens"] == 5 + 4 * 3
    assert await settled(stack) == 5 + 4 * 3
    samples = await samples_of(stack)
    kinds = {kind: samples["twinfang_key_tokens_total", "alice", kind] for kind in ("prompt", "generation")}
    assert kinds == {"prompt": 5, "generation": 12}
    assert ("twinfang_key_tokens_total", "alice", "cached") in samples
    assert samples["twinfang_key_tokens_total", "alice", "reasoning"] == 0


async def test_an_answer_without_a_stated_length_reserves_an_estimate(limited):
    context = server_info("decode").max_model_len
    stack = await limited(hanging, tokens_total=10**6)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    head = {"X-Request-Timeout": "0.3"}
    running = asyncio.create_task(stack.client.post("/v1/chat/completions", json=body, headers=head))
    await until(lambda: stack.decode[0].submitted)
    (submitted,) = stack.decode[0].submitted
    assert submitted.params.max_tokens == context - len(submitted.token_ids)
    assert account(stack).reserved == len(submitted.token_ids) + min(1024, submitted.params.max_tokens)
    await running
    assert account(stack).reserved == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_accepted_drafts_are_in_the_usage(limited, path):
    async def script(submit, send):
        stats = RequestStats(drafted_tokens=5, accepted_tokens=2)
        send(RequestOutput(submit.request_id, (300, 301, 302), finish_reason="length", stats=stats))

    stack = await limited(script)
    details = (await post(stack, path)).json()["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (2, 3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0201, "21ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3661, "1h1m1s"),
    ],
)
def test_durations_have_the_form_of_openai(seconds, text):
    assert duration(seconds) == text
