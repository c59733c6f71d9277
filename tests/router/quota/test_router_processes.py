"""The processes of a router share the limits of keys: real processes, in front of a scripted server."""

import asyncio
import contextlib
import time

import httpx

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.access.key_limits import KeyLimits
from testing.conditions import TIMEOUT_S
from testing.fleets.stack import running_router
from testing.router.scripted_servers import ScriptedDecode, saying, server_info
from testing.router.tokenizers import write_model_dir

KEY = new_key()
PER_MINUTE = 20


@contextlib.asynccontextmanager
async def router(folder, *flags):
    """Runs a router of two processes; yields its URL. This loop goes on meanwhile."""
    server = ScriptedDecode(server_info("both"))
    server.script = saying([300, 301])
    await server.start()
    model = write_model_dir(folder / "model")
    (model / "config.json").write_text("{}")
    running = running_router("--workers", "2", f"--model=tiny={model}", f"--decode={server.address}", *flags)
    try:
        url = await asyncio.to_thread(running.__enter__)
        try:
            yield url
        finally:
            await asyncio.to_thread(running.__exit__, None, None, None)
    finally:
        await server.stop()


async def test_the_processes_of_a_router_admit_what_one_would_without_being_told_where_to_count(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(
        key_line(ApiKey("alice", digest_of(KEY), limits=KeyLimits(requests_per_minute=PER_MINUTE)))
    )
    async with router(tmp_path, "--api-keys-file", str(keys)) as url:

        async def status() -> int:
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:  # any of the processes
                body, head = {"prompt": "hello", "max_tokens": 2}, {"Authorization": f"Bearer {KEY}"}
                return (await client.post("/v1/completions", json=body, headers=head)).status_code

        started = time.monotonic()
        statuses = await asyncio.gather(*(status() for _ in range(3 * PER_MINUTE)))
        could_be = PER_MINUTE + PER_MINUTE * (time.monotonic() - started) / 60
    assert set(statuses) == {200, 429}
    assert PER_MINUTE <= statuses.count(200) <= could_be + 1
