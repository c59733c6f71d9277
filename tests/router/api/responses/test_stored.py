"""Stored responses over HTTP: whose they are, and what happens without a store."""

import httpx
import orjson
import pytest

from router.access.api_keys import ApiKey, digest_of
from router.access.key_file import key_line
from router.api.responses.response_store import StoredResponse
from testing.conditions import TIMEOUT_S
from testing.router.scripted_router import MODEL, NO_TLS
from testing.router.scripted_servers import saying
from testing.router.tokenizers import EOS


@pytest.fixture
async def stack(make_stack, words, tmp_path):
    """A router with a store, and keys of alice (two of them) and bob."""
    keys = {"a1": "alice", "a2": "alice", "b": "bob"}
    lines = [key_line(ApiKey(name, digest_of(key))) for key, name in keys.items()]
    (tmp_path / "keys").write_text("\n".join(lines))
    stack = await make_stack(api_keys_file=tmp_path / "keys", response_store=tmp_path / "responses")
    stack.decode[0].script = saying([*words.encode_now("fine"), EOS], ends=True)
    return stack


@pytest.fixture
async def clients(stack):
    """A client for each key."""
    made = {
        key: httpx.AsyncClient(
            base_url=stack.url,
            timeout=TIMEOUT_S,
            verify=NO_TLS,
            headers={"Authorization": f"Bearer {key}"},
        )
        for key in ("a1", "a2", "b")
    }
    yield made
    for client in made.values():
        await client.aclose()


async def create(client, **body):
    return await client.post("/v1/responses", json={"model": MODEL, "input": "hello"} | body)


async def test_a_response_is_its_owners_whatever_key_of_the_owner_asks(clients):
    response = (await create(clients["a1"])).json()
    assert response["store"] is True
    url = f"/v1/responses/{response['id']}"
    assert (await clients["a2"].get(url)).json() == response
    for call in (
        clients["b"].get(url),
        clients["b"].delete(url),
        clients["b"].post(f"{url}/cancel"),
        clients["b"].get(f"{url}/input_items"),
    ):
        refused = await call
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    refused = await create(clients["b"], previous_response_id=response["id"])
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    assert (await create(clients["a2"], previous_response_id=response["id"])).status_code == 200
    deleted = await clients["a2"].delete(url)
    assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
    assert (await clients["a1"].get(url)).status_code == 404


async def test_what_is_not_to_be_stored_is_not(clients):
    response = (await create(clients["b"], store=False)).json()
    assert response["store"] is False
    assert (await clients["b"].get(f"/v1/responses/{response['id']}")).status_code == 404


async def test_a_conversation_counts_as_a_part_of_the_body(stack, clients):
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a" * 10**6}]}]
    long = StoredResponse("resp_1", None, b"{}", orjson.dumps(items), b"[]")
    await stack.app.state.response_store.save("bob", long)
    room = stack.app.state.body_room
    refused = await create(clients["b"], previous_response_id="resp_1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    room.max_bytes = 10**6
    refused = await create(clients["b"], previous_response_id="resp_1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert room.num_bytes == 0


async def test_what_is_read_of_the_store_counts_until_it_is_sent(stack, clients):
    long = b'[{"type":"message","id":"msg_1","text":"%b"}]' % (b"a" * 10**6)
    await stack.app.state.response_store.save("bob", StoredResponse("resp_1", None, b"{}", b"[]", long))
    await stack.app.state.response_store.save("bob", StoredResponse("resp_2", None, b"{}", long, b"[]"))
    room = stack.app.state.body_room
    for path in ("resp_1", "resp_2/input_items"):
        room.max_bytes = 10**7
        assert (await clients["b"].get(f"/v1/responses/{path}")).status_code == 200
        room.max_bytes = 10**6
        refused = await clients["b"].get(f"/v1/responses/{path}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert room.num_bytes == 0


async def test_pages_of_the_input(clients):
    texts = [f"text {i}" for i in range(5)]
    items = [{"role": "user", "content": text} for text in texts]
    response = (await create(clients["b"], input=items)).json()
    url = f"/v1/responses/{response['id']}/input_items"
    page = (await clients["b"].get(url, params={"limit": 2})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["text 4", "text 3"]
    assert (page["has_more"], page["last_id"]) == (True, page["data"][1]["id"])
    page = (await clients["b"].get(url, params={"limit": 3, "after": page["last_id"]})).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["text 2", "text 1", "text 0"]
    assert not page["has_more"]
    for params in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nobody"}, {"limit": "x"}):
        refused = await clients["b"].get(url, params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(params)))
    streamed = await clients["b"].get(f"/v1/responses/{response['id']}", params={"stream": True})
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")


async def test_without_a_store_there_is_nothing_to_read_or_continue(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    body = {"model": MODEL, "input": "hello", "store": True}
    response = (await stack.client.post("/v1/responses", json=body)).json()
    assert response["store"] is False
    url = f"/v1/responses/{response['id']}"
    for call in (stack.client.get(url), stack.client.delete(url), stack.client.post(f"{url}/cancel")):
        refused = await call
        assert refused.status_code == 404
        assert "--response-store FILE" in refused.json()["error"]["message"]
    refused = await stack.client.post("/v1/responses", json=body | {"previous_response_id": response["id"]})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "previous_response_not_found")
    assert "--response-store FILE" in error["message"]
