"""Which requests are accepted: API keys, the queue over HTTP, limits of headers, pages of other origins,
draining.
"""

import asyncio
import signal
import subprocess
import sys

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError, PermissionDeniedError

from router.access import key_file
from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.admission.place import RESERVED
from router.fleet.links.capacity import MARGIN_A_PREFILL_SERVER
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import MODEL, raw, samples_of
from testing.router.scripted_servers import ScriptedDecode, hanging, saying, server_info, server_stats
from testing.router.tokenizers import write_model_dir
from twinfang.stack.ports import free_ports

ALICE, BATCH, WATCHER = new_key(), new_key(), new_key()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    lines = (ApiKey("alice", digest_of(ALICE)), ApiKey("batch", digest_of(BATCH), min_priority=10))
    lines += (ApiKey("watcher", digest_of(WATCHER), role="view"),)
    path.write_text("\n".join(map(key_line, lines)))
    return path


# --- API keys --------------------------------------------------------------------------------------


async def test_only_requests_with_a_key_that_holds_are_answered(make_stack, keys):
    stack = await make_stack(api_keys_file=keys)
    stack.decode[0].script = saying([300, 301])
    body = {"prompt": "hello", "max_tokens": 2}
    for path, content in (("/v1/completions", body), ("/tokenize", {"prompt": "a"}), ("/v1/nothing", {})):
        for given in (None, "Bearer wrong", "Bearer", ALICE, f"Basic {ALICE}", f"Bearer {ALICE} {ALICE}"):
            headers = {} if given is None else {"Authorization": given}
            refused = await stack.client.post(path, json=content, headers=headers)
            assert refused.status_code == 401
            assert refused.headers["WWW-Authenticate"] == "Bearer"
            assert "X-Request-Id" in refused.headers
            error = refused.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", None)
            assert error["code"] == "invalid_api_key"
    both = [("Authorization", f"Bearer {ALICE}"), ("Authorization", "Bearer x")]
    assert (await stack.client.post("/v1/completions", json=body, headers=both)).status_code == 401
    assert (await stack.client.get("/v1/models")).status_code == 401
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await stack.client.get(path)).status_code == 200
    assert not stack.decode[0].submitted
    answer = await stack.client.post("/v1/completions", json=body, headers=bearer(ALICE))
    assert answer.json()["usage"]["completion_tokens"] == 2
    samples = await samples_of(stack)
    assert samples["twinfang_unauthorized_requests_total",] == 20
    assert not [name for name, *_ in samples if name.startswith("twinfang_key_")], (
        "nobody may see keys' names"
    )
    samples = await samples_of(stack, headers=bearer(WATCHER))
    assert samples["twinfang_key_requests_total", "alice", "completed"] == 1
    assert samples["twinfang_key_tokens_total", "alice", "generation"] == 2


async def test_a_client_library_tells_a_bad_key_from_a_forbidden_priority(make_stack, keys):
    stack = await make_stack(api_keys_file=keys)
    stack.decode[0].script = saying([300])
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(AuthenticationError):
            await client.completions.create(**asked)
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key=BATCH, max_retries=0) as client:
        with pytest.raises(PermissionDeniedError, match="10"):
            await client.completions.create(**asked, extra_body={"priority": 9})
        for extra in ({}, {"priority": 10}, {"priority": 11}):
            await client.completions.create(**asked, extra_body=extra)


async def test_a_key_holds_from_when_it_is_added_until_it_is_removed(make_stack, keys, monkeypatch):
    monkeypatch.setattr(key_file, "LOOK_INTERVAL_S", 0.02)
    stack = await make_stack(api_keys_file=keys)
    keys.write_text(key_line(ApiKey("new", digest_of("new key"))))
    await until(lambda: stack.services.key_file.keys.find("new key"))
    assert (await stack.client.get("/v1/models", headers=bearer("new key"))).status_code == 200
    assert (await stack.client.get("/v1/models", headers=bearer(ALICE))).status_code == 401


# --- the queue -------------------------------------------------------------------------------------


async def test_more_than_servers_have_room_for_wait_and_are_answered_in_order_of_priority(make_stack):
    stack = await make_stack(num_prefill=0, role="both", max_requests_in_flight=1)
    decode = stack.decode[0]
    release = asyncio.Event()

    async def wait_then_say(submit, send):
        await release.wait()
        await saying([300])(submit, send)

    decode.script = wait_then_say
    requests = [asyncio.create_task(stack.complete(prompt=[5, 6], max_tokens=1))]
    await until(lambda: decode.submitted)
    for index, priority in enumerate((5, 0, -5)):
        body = {"prompt": [5, 6, 7 + index], "max_tokens": 1, "priority": priority, "stream": index == 1}
        requests.append(asyncio.create_task(stack.complete(**body)))
        await until(lambda index=index: stack.gate.num_waiting == index + 1)
    samples = await samples_of(stack)
    assert samples["twinfang_requests_queued", MODEL] == 3
    assert samples["twinfang_places_taken", MODEL] == samples["twinfang_places", MODEL] == 1
    release.set()
    assert {answer.status_code for answer in await asyncio.gather(*requests)} == {200}
    assert [submit.token_ids[-1] for submit in decode.submitted] == [6, 9, 8, 7]
    assert (await samples_of(stack))["twinfang_request_queue_seconds_count", MODEL] == 4


async def test_as_many_run_as_the_rows_of_decode_servers_allow_and_a_few_more(make_stack):
    stack = await make_stack(num_decode=2)
    for decode in stack.decode:
        decode.script = hanging
        decode.info = server_info("decode", max_num_seqs=3)
        await decode.stop()
        await decode.start()
    await until(lambda: stack.gate.places == 6 + MARGIN_A_PREFILL_SERVER)
    requests = [asyncio.create_task(stack.complete()) for _ in range(10)]
    await until(lambda: stack.gate.num_waiting == 2)
    assert stack.gate.num_in_flight == 8
    for request in requests:
        request.cancel()
    await until(lambda: (stack.gate.num_in_flight, stack.gate.num_waiting) == (0, 0))


async def test_a_router_makes_room_for_others_that_servers_tell_it_of(make_stack):
    stack = await make_stack(num_prefill=0, role="both")
    assert stack.gate.places == 8
    stack.decode[0].stats = server_stats(num_running=8, num_waiting=5, num_routers=2)
    await until(lambda: stack.gate.places == 4)
    stack.decode[0].stats = server_stats(num_running=1, num_routers=2)
    await until(lambda: stack.gate.places == 7)


async def test_who_waits_and_goes_away_is_forgotten_and_who_waits_too_long_is_told(make_stack):
    stack = await make_stack(max_requests_in_flight=1, request_timeout_s=2.0)
    stack.decode[0].script = hanging
    running = asyncio.create_task(stack.complete())
    await until(lambda: stack.decode[0].submitted)
    gone = asyncio.create_task(stack.complete(stream=True))
    late = asyncio.create_task(stack.complete())
    await until(lambda: stack.gate.num_waiting == 2)
    gone.cancel()
    await until(lambda: stack.gate.num_waiting == 1)
    assert (await late).status_code == (await running).status_code == 504
    assert len(stack.decode[0].submitted) <= 2


async def test_a_refusal_says_when_to_come_back(make_stack):
    stack = await make_stack(max_requests_in_flight=1, max_queue=0)
    stack.decode[0].script = hanging
    running = asyncio.create_task(stack.complete())
    await until(lambda: stack.decode[0].submitted)
    stack.gate.residence.mean_s = 7.0
    refused = await stack.complete()
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "7")
    assert refused.json()["error"]["code"] == "overloaded"
    running.cancel()


# --- headers and origins ---------------------------------------------------------------------------


async def test_heads_that_are_too_large_are_refused_whole_or_in_pieces(make_stack):
    stack = await make_stack(max_header_bytes=4096)
    start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    for parts in (
        (start + b"X: " + b"a" * 5000 + b"\r\n\r\n",),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",),
        (start, b"X: " + b"a" * 5000),
        (start + b"Y: y\r\n" * 200, b"Y: y\r\n" * 600),
    ):
        assert (await raw(stack.url, *parts)).startswith(b"HTTP/1.1 431 ")
    assert b"--max-header-size" in await raw(stack.url, start + b"X: " + b"a" * 5000 + b"\r\n\r\n")
    fits = await raw(stack.url, start + b"Connection: close\r\nX: " + b"a" * 3000 + b"\r\n\r\n")
    assert fits.startswith(b"HTTP/1.1 200 ")
    assert b"invalid_http" in await raw(stack.url, b"nonsense\r\n\r\n")
    several = [await stack.client.get("/healthz", headers={"X": "a" * 3000}) for _ in range(3)]
    assert {answer.status_code for answer in several} == {200}, "heads on one connection were added up"


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def in_chunks(body: bytes, size: int) -> bytes:
    """All but the end of the trailers."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n"


@pytest.mark.parametrize("size", [1, 1000])
async def test_trailers_of_a_chunked_body_are_no_headers(make_stack, size):
    stack = await make_stack(max_header_bytes=4096)
    stack.decode[0].script = saying([300])
    body = in_chunks(b'{"prompt": "hello", "max_tokens": 1}' + b" " * 2000, size)
    names = (
        "X-Request-Timeout: 0.0001",
        "X-Request-Id: evil",
        "Content-Encoding: gzip",
        "Expect: 100-continue",
    )
    trailers = [f"{name}\r\n".encode() for name in names]
    for parts in ((CHUNKED + body + b"".join(trailers) + b"\r\n",), (CHUNKED, body, *trailers, b"\r\n")):
        answer = await raw(stack.url, *parts)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert b"evil" not in answer
    assert len(stack.decode[0].submitted) == 2


@pytest.mark.parametrize("line", [b"T: a\r\n", b"a"], ids=["many", "one without end"])
async def test_trailers_count_as_headers_do(make_stack, line):
    stack = await make_stack(max_header_bytes=4096)
    body = in_chunks(b'{"prompt": "hello", "max_tokens": 1}', 1000)
    trailers = line * (300_000 // len(line))  # more than one read takes
    for parts in (
        (CHUNKED + body + trailers,),
        (CHUNKED + body, *(trailers[start : start + 5000] for start in range(0, len(trailers), 5000))),
        (CHUNKED + in_chunks(b"", 1), trailers),
    ):
        assert (await raw(stack.url, *parts)).startswith(b"HTTP/1.1 431 ")
    whole = await raw(stack.url, CHUNKED + body + b"T: a\r\n" * 1000 + b"\r\n")
    assert whole.startswith(b"HTTP/1.1 431 "), "those that come with the body in one piece were not counted"
    await until(lambda: stack.gate.num_in_flight == 0)
    assert not stack.decode[0].submitted


async def test_pages_of_other_origins_are_answered_only_if_they_are_named(make_stack):
    page, other = {"Origin": "https://chat.example.com"}, {"Origin": "https://example.org"}
    stack = await make_stack()
    answer = await stack.client.get("/v1/models", headers=page)
    assert not [name for name in answer.headers if name.startswith("access-control")]
    stack = await make_stack(cors_origins=("https://chat.example.com",))
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    asked = await stack.client.options("/v1/chat/completions", headers=page | asks)
    assert asked.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    answer = await stack.client.get("/v1/models", headers=page)
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "access-control-allow-origin" not in (await stack.client.get("/v1/models", headers=other)).headers


async def test_a_browser_may_ask_what_it_may_send_without_a_key(make_stack, keys):
    stack = await make_stack(cors_origins=("*",), api_keys_file=keys)
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert (await stack.client.options("/v1/completions", headers=asks)).status_code == 200


# --- the drain -------------------------------------------------------------------------------------


async def test_a_router_that_is_stopped_first_says_so_then_ends_what_runs_and_logs_no_key(tmp_path, keys):
    decode = ScriptedDecode(server_info("both"), script=hanging)
    await decode.start()
    (port,) = free_ports(1)
    model = write_model_dir(tmp_path / "model")
    (model / "config.json").write_text("{}")
    flags = ["--model", str(model), "--decode", decode.address, "--port", str(port), "--log-level", "debug"]
    flags += ["--api-keys-file", str(keys), "--served-model-name", MODEL]
    log = (tmp_path / "log").open("wb")
    command = [sys.executable, "-m", "twinfang", "router", *flags]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    secret = "hunter2-is-no-key-of-ours"
    body = {"prompt": "hello", "max_tokens": 50, "stream": True}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:

            async def status(path: str, **kwargs) -> int:
                try:
                    return (await client.get(path, **kwargs)).status_code
                except httpx.TransportError:
                    return 0

            async with asyncio.timeout(TIMEOUT_S):
                while await status("/readyz") != 200:
                    await asyncio.sleep(0.05)
            assert await status("/v1/models", headers=bearer(secret)) == 401
            assert await status("/v1/models", headers={"Authorization": secret}) == 401
            assert await status(f"/v1/{ALICE}?key={ALICE}", headers=bearer(ALICE)) == 404
            bad = {"prompt": 5, "api_key": ALICE}
            assert (await client.post("/v1/completions", json=bad, headers=bearer(ALICE))).status_code == 400
            with keys.open("a") as file:
                file.write(f"\neve {secret}\n")  # somebody's mistake; the keys stay as they were
            async with client.stream("POST", "/v1/completions", json=body, headers=bearer(ALICE)) as stream:
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(TIMEOUT_S):
                    while await status("/readyz") != 503:
                        await asyncio.sleep(0.01)
                assert await status("/healthz") == 200
                refused = await client.post("/v1/completions", json=body, headers=bearer(ALICE))
                assert refused.status_code == 503
                assert refused.headers["Retry-After"] == "1"
                assert refused.headers["Connection"] == "close"
                assert "about to stop" in refused.json()["error"]["message"]
                await saying([300] * 49)(decode.submitted[0], decode.send)
                assert "data: [DONE]" in (await stream.aread()).decode()
        assert await asyncio.to_thread(process.wait, TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()
        log.close()
        await decode.stop()
    written = (tmp_path / "log").read_text()
    assert "level=debug" in written
    assert "drained: 0 requests are left" in written
    for key in (ALICE, BATCH, secret):
        assert key not in written
        assert digest_of(key).hex() not in written


async def test_many_choices_begin_by_and_by_and_a_small_request_is_answered_meanwhile(make_stack):
    """They take three quarters of the places at first; each choice is answered, in its order."""
    stack = await make_stack()
    decode, gate = stack.decode[0], asyncio.Event()

    async def script(submit, send):
        if submit.params.max_tokens == 2:
            await gate.wait()
        await saying([300, 301])(submit, send)

    decode.script = script
    large = asyncio.create_task(stack.complete(n=40, max_tokens=2))
    num_begun = stack.gate.places - stack.gate.places // RESERVED
    await until(lambda: len(decode.submitted) == num_begun)
    small = await stack.complete(max_tokens=1)
    assert small.status_code == 200
    assert len(decode.submitted) == num_begun + 1
    gate.set()
    response = await large
    assert response.status_code == 200
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(40))
    assert response.json()["usage"]["completion_tokens"] == 80
