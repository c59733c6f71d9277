import asyncio
import json

from router.access import key_file
from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.admin import events
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_servers import saying


async def test_events_tell_what_there_is_and_what_changes(make_admin_stack):
    stack = await make_admin_stack()
    stack.decode[0].script = saying([300])
    seen = []
    async with asyncio.timeout(TIMEOUT_S), stack.client.stream("GET", "/admin/v1/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        name, has_asked = "", False
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            if line.startswith("data: "):
                seen.append((name, json.loads(line.removeprefix("data: "))))
            if not has_asked and [event for event, _ in seen].count("stats") == 2:
                has_asked = True
                await stack.complete(prompt=[5, 6], max_tokens=1)
                await stack.decode[0].stop()
            states = [data["state"] for event, data in seen if event == "worker" and data["role"] == "decode"]
            ended = [data for event, data in seen if event == "request" and data["state"] == "finished"]
            if ended and states[-1] == "unreachable":
                break
    names = {"worker", "request", "config", "stats", "keys", "models", "processes"}
    assert {event for event, _ in seen} == names
    assert states[0] == "serving"
    await until(lambda: not stack.app.state.event_feed._subscribers)


async def test_a_key_that_is_removed_sees_no_more(make_stack, tmp_path, monkeypatch):
    monkeypatch.setattr(key_file, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(events, "ROLE_CHECK_S", 0.0)
    viewer, keys = new_key(), tmp_path / "keys"
    keys.write_text(key_line(ApiKey("viewer", digest_of(viewer), role="view")))
    stack = await make_stack(api_keys_file=keys)
    headers = {"Authorization": f"Bearer {viewer}"}
    call = stack.client.stream("GET", "/admin/v1/events", headers=headers)
    async with asyncio.timeout(TIMEOUT_S), call as stream:
        lines = stream.aiter_lines()
        while await anext(lines) != "event: stats":
            pass
        keys.write_text(key_line(ApiKey("viewer", digest_of(viewer))))  # without its role
        async for _ in lines:
            pass
    await until(lambda: not stack.app.state.event_feed._subscribers)
