import asyncio
import json

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
