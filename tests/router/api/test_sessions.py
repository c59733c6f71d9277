"""Sessions over HTTP: whose they are, what servers hear of them, and where their requests go."""

from __future__ import annotations

import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from testing.conditions import until
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import Scripted, saying, server_stats
from wire.messages.sessions import NAME_BYTES, SessionNews
from wire.rpc import TEND_SESSION

PROMPT = list(range(5, 45))
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


@pytest.fixture
async def stack(make_stack):
    made = await make_stack()
    made.decode[0].script = saying([50])
    return made


async def sent(stack, path="/v1/completions", headers=None, **body):
    """Sends a request; returns the session's name that servers got."""
    default = {"prompt": PROMPT, "max_tokens": 1} if path == "/v1/completions" else CHAT
    reply = await stack.client.post(path, json={"model": MODEL} | default | body, headers=headers)
    assert reply.status_code == 200, reply.text
    (prefill,), (decode,) = stack.prefill, stack.decode
    assert prefill.requests[-1].session == decode.submitted[-1].session
    return prefill.requests[-1].session


async def tend(stack, action, headers=None, **body):
    return await stack.client.post(f"/v1/sessions/{action}", json={"model": MODEL} | body, headers=headers)


async def test_a_session_has_one_name_however_it_is_given(stack):
    name = await sent(stack, session_id="chat-17")
    assert len(name) == 2 * NAME_BYTES
    assert await sent(stack, headers={"X-Session-Id": "chat-17"}) == name
    assert await sent(stack, headers={"X-Session-Id": "other"}, session_id="chat-17") == name
    assert await sent(stack, "/v1/chat/completions", session_id="chat-17") == name
    assert await sent(stack, "/v1/messages", session_id="chat-17") == name
    assert await sent(stack, session_id="chat-17", prompt_cache_key="x") == name
    by_cache_key = await sent(stack, prompt_cache_key="chat-17")
    names = {name, by_cache_key, await sent(stack, session_id="chat-18"), await sent(stack)}
    names.add(await sent(stack, session_id="chat-17", cache_salt="x"))
    assert len(names) == 5
    assert "" in names
    reply = await tend(stack, "release", prompt_cache_key="chat-17")
    assert reply.status_code == 200, reply.text
    assert stack.prefill[0].tended[-1].session == by_cache_key


@pytest.mark.parametrize("given", ["", "a b", "a\n", "ä", "x" * 257])
async def test_a_session_id_has_few_characters(stack, given):
    reply = await stack.complete(session_id=given)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "session_id"
    assert str(len(given)) in reply.json()["error"]["message"]
    assert (await tend(stack, "release", session_id=given)).status_code == 400
    assert not stack.prefill[0].tended


async def test_a_session_of_one_key_is_out_of_reach_of_another(make_stack, tmp_path):
    keys = {name: new_key() for name in ("alice", "bob")}
    path = tmp_path / "keys"
    path.write_text("\n".join(key_line(ApiKey(name, digest_of(key))) for name, key in keys.items()))
    for isolation in ("key", "none"):
        stack = await make_stack(api_keys_file=path, cache_isolation=isolation)
        stack.decode[0].script = saying([50])
        auth = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
        names = {name: await sent(stack, headers=auth[name], session_id="chat") for name in keys}
        assert names["alice"] != names["bob"]
        calls = (
            ("retain", {"seconds": 60}),
            ("release", {}),
            ("prefetch", {}),
            ("fork", {"new_session_id": "b"}),
        )
        for action, more in calls:
            reply = await tend(stack, action, auth["bob"], session_id="chat", **more)
            assert reply.status_code == 200, reply.text
            call = stack.prefill[0].tended[-1]
            assert (call.session, call.action, call.owner) == (names["bob"], action, "key bob")
        assert (await tend(stack, "release", session_id="chat")).status_code == 401


async def test_servers_answers_are_summed(make_stack):
    stack = await make_stack(num_prefill=3)
    for server, news in zip(
        stack.prefill, (SessionNews(1, 64), SessionNews(1, 128, over_quota=True), None), strict=True
    ):
        server.session_news = news
    reply = await tend(stack, "retain", session_id="chat", seconds=90)
    assert reply.json() == {
        "object": "session",
        "model": MODEL,
        "num_servers": 2,
        "num_starts": 2,
        "num_tokens": 128,
        "over_quota": True,
    }
    assert [server.tended[0].for_s for server in stack.prefill[:2]] == [90.0, 90.0]


@pytest.mark.parametrize("seconds", [None, 0, 0.5, -1, 86_401, "60", True])
async def test_a_start_is_retained_for_a_bounded_time(stack, seconds):
    reply = await tend(stack, "retain", session_id="chat", seconds=seconds)
    assert reply.status_code == 400
    assert not stack.prefill[0].tended


async def test_a_fork_begins_a_session_of_the_same_key_and_salt(stack):
    name = await sent(stack, session_id="chat")
    into = await sent(stack, session_id="chat/2")
    salted = await sent(stack, session_id="chat/2", cache_salt="x")
    stack.prefill[0].session_news = SessionNews(2, 64)
    reply = await tend(stack, "fork", session_id="chat", new_session_id="chat/2")
    assert (reply.status_code, reply.json()["num_starts"], reply.json()["num_tokens"]) == (200, 2, 64)
    call = stack.prefill[0].tended[-1]
    assert (call.session, call.action, call.into) == (name, "fork", into)
    await tend(stack, "fork", session_id="chat", new_session_id="chat/2", cache_salt="x")
    assert stack.prefill[0].tended[-1].into == salted


@pytest.mark.parametrize("new_id", [None, "", "a b", "chat", "x" * 257, 5])
async def test_a_fork_needs_another_session_s_id(stack, new_id):
    reply = await tend(stack, "fork", session_id="chat", new_session_id=new_id)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "new_session_id")
    assert not stack.prefill[0].tended


async def test_a_call_without_a_session_is_refused(stack):
    reply = await tend(stack, "prefetch")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "session_id")


@pytest.mark.parametrize(
    ("path", "body", "seconds"),
    [
        ("/v1/completions", {"prompt_cache_retention": "24h"}, 86_400.0),
        ("/v1/chat/completions", {"prompt_cache_retention": "24h"}, 86_400.0),
        ("/v1/messages", {"cache_control": {"type": "ephemeral"}}, 300.0),
        ("/v1/messages", {"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600.0),
    ],
)
async def test_a_request_may_ask_that_its_start_is_retained(stack, path, body, seconds):
    name = await sent(stack, path, session_id="chat", **body)
    await until(lambda: stack.prefill[0].tended)
    (call,) = stack.prefill[0].tended
    assert (call.session, call.action, call.for_s) == (name, "retain", seconds)
    await sent(stack, path, **body)
    await sent(stack, path, session_id="chat")
    assert len(stack.prefill[0].tended) == 1, "without a session, or without a time, nothing is retained"


async def test_an_unknown_retention_is_refused(stack):
    reply = await stack.complete(prompt_cache_retention="7d")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_cache_retention")


async def test_a_server_without_sessions_serves_all_the_same(make_stack, monkeypatch):
    monkeypatch.setattr(Scripted, "unknown_calls", {TEND_SESSION.name})
    stack = await make_stack()
    stack.decode[0].script = saying([50])
    await sent(stack, session_id="chat", prompt_cache_retention="24h")
    reply = await tend(stack, "prefetch", session_id="chat")
    assert (reply.status_code, reply.json()["num_servers"]) == (200, 0)


async def test_a_session_s_prompts_meet_at_one_server_while_its_load_allows(make_stack):
    stack = await make_stack(num_prefill=3, prefill_policy="prefix_affinity")
    stack.decode[0].script = saying([50])

    async def complete(num):
        for _ in range(num):
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "session_id": "chat-17"}
            assert (await stack.client.post("/v1/completions", json=body)).status_code == 200

    await complete(6)
    home = max(stack.prefill, key=lambda server: len(server.requests))
    assert sorted(len(server.requests) for server in stack.prefill) == [0, 0, 6]
    home.stats = server_stats(queued_tokens=5000)
    known = {address: one for _, address, one in stack.services.pool.assignments()}[home.address]
    await until(lambda: known.load().queued_tokens == 5000)
    await complete(4)
    assert len(home.requests) == 6
