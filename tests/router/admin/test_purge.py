"""Cached prompts are deleted on all servers by one call, which says clearly what may be left."""

import asyncio
import json

import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from testing.conditions import until
from testing.router.admin_calls import get, post
from wire.messages.purge import PurgeNews, PurgePrefixes


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text(key_line(ApiKey("alice", digest_of(new_key()))))
    return path


def of(path, event):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["event"] == event]


async def test_all_servers_are_asked_and_their_answers_are_summed(make_admin_stack, keys, tmp_path):
    path = tmp_path / "audit.jsonl"
    stack = await make_admin_stack(num_prefill=2, num_decode=2, api_keys_file=keys, audit_log=path)
    servers = [*stack.prefill, *stack.decode]
    for server in servers:
        server.purge_news = PurgeNews(2, 3, 1000)
    told = await post(stack, "/purge", key="alice")
    counts = {"num_servers": 4, "num_starts": 8, "num_records": 12, "num_bytes": 4000, "warning": ""}
    assert told == {"object": "purge", **counts}
    assert [server.purges for server in servers] == [[PurgePrefixes("key alice", wait_s=30.0)]] * 4
    (call,) = of(path, "call")
    assert (call["what"], call["status"]) == ("POST /admin/v1/purge", 200)
    assert (call["before"], call["after"]) == ({"key": "alice", "wait_s": 30.0}, counts)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"key": "tenant:acme"}, PurgePrefixes("key tenant:acme", wait_s=30.0)),
        ({"key": "alice", "wait_s": 0}, PurgePrefixes("key alice")),
        ({"older_than_hours": 24}, PurgePrefixes(older_than_s=86_400.0)),
        ({"everything": True}, PurgePrefixes(wait_s=30.0)),
    ],
)
async def test_what_servers_are_asked_for(make_admin_stack, keys, body, wanted):
    stack = await make_admin_stack(api_keys_file=keys)
    await post(stack, "/purge", **body)
    assert stack.prefill[0].purges == [wanted]


async def test_a_salt_stands_in_the_audit_log_by_its_digest(make_admin_stack, tmp_path):
    path = tmp_path / "audit.jsonl"
    stack = await make_admin_stack(audit_log=path)
    await post(stack, "/purge", cache_salt="user-17@example.com")
    assert stack.prefill[0].purges == [PurgePrefixes("given user-17@example.com", wait_s=30.0)]
    (call,) = of(path, "call")
    assert call["before"]["cache_salt"].startswith("sha256:")
    assert "user-17" not in path.read_text()


async def test_of_an_unknown_key_it_is_said_that_there_is_nothing(make_admin_stack, keys):
    stack = await make_admin_stack(api_keys_file=keys)
    warning = (await post(stack, "/purge", key="alcie"))["warning"]
    assert warning == (
        "none of the router's servers (2) had such a prompt, and no API key here has the name 'alcie'"
    )
    assert (await post(stack, "/purge", key="alice"))["warning"].endswith("had such a prompt")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give one of key, cache_salt, older_than_hours, everything"),
        ({"key": "alice", "everything": True}, "Got key, everything"),
        ({"key": "a b"}, "must be the name of a key, got 'a b'"),
        ({"key": ""}, "must be the name of a key"),
        ({"cache_salt": "x"}, "requests to this router have keys"),
        ({"older_than_hours": -1}, "older_than_hours"),
        ({"everything": False}, "everything"),
        ({"key": "alice", "wait_s": 601}, "wait_s"),
        ({"tenant": "alice"}, "tenant"),
    ],
)
async def test_a_bad_call_deletes_nothing(make_admin_stack, keys, body, message):
    stack = await make_admin_stack(api_keys_file=keys)
    response = await stack.client.post("/admin/v1/purge", json=body)
    assert response.status_code == 400
    assert message in response.text
    assert not stack.prefill[0].purges


async def test_what_keys_share_is_nobody_s(make_admin_stack, keys):
    stack = await make_admin_stack(api_keys_file=keys, cache_isolation="none")
    error = (await post(stack, "/purge", 400, key="alice"))["error"]
    assert "nobody can say whose they are" in error["message"]
    await post(stack, "/purge", cache_salt="x")
    assert stack.prefill[0].purges == [PurgePrefixes("given x", wait_s=30.0)]


async def test_what_may_be_left_is_an_error_that_names_the_servers(make_admin_stack, keys, tmp_path):
    path = tmp_path / "audit.jsonl"
    stack = await make_admin_stack(num_prefill=3, api_keys_file=keys, audit_log=path)
    failing, busy, gone = stack.prefill
    failing.purge_news, busy.purge_news = None, PurgeNews(1, 0, 0, num_under_way=2)
    await gone.stop()
    message = (await post(stack, "/purge", 503, key="alice"))["error"]["message"]
    assert "something may be left" in message
    assert f"{failing.address}: not today" in message
    assert f"{busy.address}: 2 requests did not end within 30 s" in message
    assert f"prefill server {gone.address}: " in message
    assert "2 of 4 servers have deleted what they could" in message
    (call,) = of(path, "call")
    assert (call["status"], call["asked"]) == (503, {"key": "alice", "wait_s": 30.0})


async def test_a_server_that_drains_is_asked_first(make_admin_stack):
    """Until its prompts are gone it may hand them to a server that has deleted its own already."""
    stack = await make_admin_stack(num_prefill=2)
    leaving, staying = stack.prefill
    workers = {one["address"]: one["id"] for one in (await get(stack, "/workers"))["workers"]}
    await post(stack, f"/workers/{workers[leaving.address]}/drain")
    leaving.may_purge.clear()
    purging = asyncio.create_task(post(stack, "/purge", everything=True))
    await until(lambda: leaving.purges)
    await get(stack, "/workers")
    assert [one.purges for one in (staying, *stack.decode)] == [[], []]
    leaving.may_purge.set()
    assert (await purging)["num_servers"] == 3
    assert staying.purges == stack.decode[0].purges == leaving.purges
