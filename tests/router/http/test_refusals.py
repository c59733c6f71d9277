"""Each refused request counts once, under the status that the client got."""

import pytest

from router.access.api_keys import ApiKey, digest_of
from router.access.key_file import key_line
from router.http.refusals import Refusals
from testing.router.scripted_router import raw, samples_of
from testing.router.scripted_servers import failing, hanging
from wire.errors import ContextLengthError

NAME = "twinfang_refused_requests_total"


@pytest.fixture
async def stack(make_stack, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(key_line(ApiKey("alice", digest_of("key"), min_priority=5)))
    stack = await make_stack(
        api_keys_file=keys, max_body_bytes=2000, max_header_bytes=4096, max_queue=0, max_requests_in_flight=1
    )
    stack.client.headers["Authorization"] = "Bearer key"
    return stack


async def refused(stack) -> dict[str, float]:
    return {key[1]: n for key, n in (await samples_of(stack)).items() if key[0] == NAME and n}


async def test_each_refusal_counts_once(stack):
    for status, ask in {
        400: lambda: stack.complete(temperature=-1),
        401: lambda: stack.client.get("/v1/models", headers={"Authorization": "Bearer no"}),
        403: lambda: stack.complete(priority=0),
        404: lambda: stack.complete(model="another"),
        405: lambda: stack.client.put("/v1/models"),
        413: lambda: stack.complete(prompt="a" * 3000),
    }.items():
        before = await refused(stack)
        assert (await ask()).status_code == status
        assert await refused(stack) == before | {str(status): 1.0}


async def test_what_is_no_request_counts_too(stack):
    start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    assert (await raw(stack.url, start + b"X: " + b"a" * 5000 + b"\r\n\r\n")).startswith(b"HTTP/1.1 431 ")
    assert (await raw(stack.url, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    assert await refused(stack) == {"400": 1.0, "431": 1.0}


async def test_a_full_queue_and_a_drain_count_and_probes_do_not(stack):
    stack.decode[0].script = hanging
    async with stack.client.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True}
    ) as running:
        assert running.status_code == 200
        assert (await stack.complete()).status_code == 429
        stack.app.state.drain.begin()
        for path in ("/readyz", "/health"):
            assert (await stack.client.get(path)).status_code == 503
        assert (await stack.complete()).status_code == 503
        assert await refused(stack) == {"429": 1.0, "503": 1.0}


async def test_a_refusal_by_a_server_counts_and_an_error_in_a_stream_does_not(stack):
    stack.decode[0].script = failing(ContextLengthError("too long"))
    assert (await stack.complete()).status_code == 400
    stack.decode[0].script = failing(ContextLengthError("too long"), after=(50,))
    answer = await stack.complete(stream=True)
    assert answer.status_code == 200
    assert await refused(stack) == {"400": 1.0}


def test_every_known_status_begins_at_zero():
    (family,) = Refusals().collect()
    known = {sample.labels["status"] for sample in family.samples}
    assert {"400", "401", "403", "404", "405", "413", "429", "431", "500", "503", "504"} <= known
    assert len(known) < 25
