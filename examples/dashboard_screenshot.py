"""Makes pictures of the dashboard's pages under load: light, dark, and in a phone's size.

    python -m examples.dashboard_screenshot --output docs

Starts `twinfang up` with two prefill servers, two decode servers, two router processes, API keys and the
bundled model. Keeps clients busy for a minute and a half (prompts that share their beginnings, answers of all
lengths), while a headless Chromium draws `/admin/ui`. For the picture of a timeline it kills the decode
server that an answer is on. The fonts are those of this machine: the page asks for Inter first, then for the
system's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser, Page, async_playwright

from examples.chromium import MISSING, find_chromium, launch_options
from router.access.api_keys import ApiKey, digest_of
from router.access.key_file import key_line
from twinfang.launch import LaunchedStack, launch

FLAGS = ("--prefill", "2", "--decode", "2", "--speculative", "3", "--cache-memory", "0.08", "--workers", "2")
KEYS = {"chat-app": 6, "docs-search": 3, "nightly-batch": 1}
"""How many of the clients use each key."""
LONG_ANSWER = 700
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
REQUEST_TIMEOUT_S = 120.0

NUM_CLIENTS = 10
NUM_BEGINNINGS = 6
BEGINNING_CHARS = (400, 2400)
WORDS = (
    "def",
    "class",
    "return",
    "self",
    "items",
    "value",
    "index",
    "for",
    "in",
    "not",
    "None",
    "list",
    "yield",
)


def secret_of(name: str) -> str:
    return f"a-key-for-pictures-of-{name}"


KEYS_OF = {name: ApiKey(name, digest_of(secret_of(name))) for name in KEYS}

WIDE = {"width": 1440, "height": 1180}
PHONE = {"width": 390, "height": 844}


def main() -> int:
    """Makes the pictures; returns the exit code."""
    parser = argparse.ArgumentParser(description="pictures of the dashboard under load")
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder of the pictures")
    parser.add_argument("--seconds", type=float, default=90.0, help="load before the first picture")
    arguments = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        print(MISSING, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="twinfang-dashboard-") as folder:
        token = secrets.token_hex(16)
        token_file = Path(folder) / "admin-token"
        token_file.write_text(token)
        (Path(folder) / "keys").write_text("\n".join(map(key_line, KEYS_OF.values())))
        files = ("--admin-token-file", str(token_file), "--api-keys-file", str(Path(folder) / "keys"))
        stack = launch(Path(folder), "up", *FLAGS, *files)
        try:
            stack.wait_until_ready(START_TIMEOUT_S)
            asyncio.run(draw(stack, token, chromium, arguments.output, arguments.seconds))
        finally:
            stack.stop(STOP_TIMEOUT_S)
    return 0


async def draw(stack: LaunchedStack, token: str, chromium: str, output: Path, load_s: float) -> None:
    """Draws all pictures under one load."""
    async with load(stack), async_playwright() as playwright:
        browser = await playwright.chromium.launch(**launch_options(chromium))
        wide = await signed_in(browser, stack.url, token, WIDE)
        started = time.monotonic()
        while time.monotonic() - started < load_s:
            await asyncio.sleep(0.5)
        for scheme, name in (("light", "dashboard.png"), ("dark", "dashboard-dark.png")):
            await wide.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            await picture(wide, output / name)
        await wide.emulate_media(color_scheme="light")
        for view, height in (("caches", 640), ("keys", 300)):
            await wide.set_viewport_size({"width": WIDE["width"], "height": height})
            await open_view(wide, view)
            await picture(wide, output / f"dashboard-{view}.png")
        await wide.set_viewport_size({"width": WIDE["width"], "height": 780})
        await try_prompt(wide)
        await picture(wide, output / "dashboard-try.png")
        await wide.set_viewport_size(WIDE)  # type: ignore[arg-type]
        await wide.emulate_media(color_scheme="dark")
        await open_failover(wide, stack, token)
        await picture(wide, output / "dashboard-timeline.png")
        phone = await signed_in(browser, stack.url, token, PHONE)
        await phone.wait_for_timeout(8_000)  # so that each chart has several points to draw a line
        await picture(phone, output / "dashboard-narrow.png")
        await browser.close()


async def signed_in(browser: Browser, url: str, token: str, size: dict[str, int]) -> Page:
    """Opens a page of this size and waits until it shows values."""
    page = await browser.new_page(viewport=size)  # type: ignore[arg-type]
    await page.goto(f"{url}/admin/ui")
    await page.get_by_label("Admin token").fill(token)
    await page.get_by_role("button", name="Open the dashboard").click()
    await page.locator("[data-worker]").first.wait_for()
    return page


async def open_view(page: Page, view: str) -> None:
    await page.locator(f"nav a[href='#{view}']").click()
    await page.locator(f"nav a[href='#{view}'][aria-current=page]").wait_for()


async def try_prompt(page: Page) -> None:
    """Sends a prompt on the page that is for it, and waits for the answer."""
    await open_view(page, "try")
    await page.get_by_role("button", name="Completion").click()
    await page.get_by_label("Prompt", exact=True).fill("def fibonacci(n):")
    await page.get_by_label("API key", exact=True).fill(secret_of("chat-app"))
    await page.get_by_role("button", name="Send").click()
    await page.get_by_text("Done.").wait_for()


async def open_failover(page: Page, stack: LaunchedStack, token: str) -> None:
    """Kills the decode server that an answer is on, and opens the timeline of the answer once it has ended on
    the other one."""
    admin = {"Authorization": f"Bearer {token}"}
    headers = {"X-Request-Id": "one-that-fails-over", "Authorization": f"Bearer {secret_of('chat-app')}"}
    body = {"model": stack.model, "prompt": "def fibonacci(n):", "max_tokens": LONG_ANSWER}
    body |= {"ignore_eos": True}
    async with httpx.AsyncClient(base_url=stack.url, timeout=REQUEST_TIMEOUT_S, headers=admin) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
        while (found := await request_of(http, "cmpl-one-that-fails-over")) is None:
            await asyncio.sleep(0.1)
        workers = (await http.get("/admin/v1/workers")).json()["workers"]
        address = next(one["address"] for one in workers if one["id"] == found["decode_worker"])
        server = next(one for one in stack.processes().values() if one.address == address)
        os.kill(server.pid, signal.SIGKILL)
        (await asked).raise_for_status()
    await open_view(page, "overview")
    await page.locator("[data-request='cmpl-one-that-fails-over']").get_by_role("button").first.click()
    await page.locator(".attempts").wait_for()


async def request_of(http: httpx.AsyncClient, request_id: str) -> dict[str, Any] | None:
    """Returns a request that has generated some tokens; None if there is none yet."""
    response = await http.get(f"/admin/v1/requests/{request_id}")
    found: dict[str, Any] = response.json()
    return found if response.status_code == 200 and found["generated_tokens"] > LONG_ANSWER / 8 else None


async def picture(page: Page, path: Path) -> None:
    """Takes a picture of the window's content."""
    await page.screenshot(path=path)
    print(f"{path}: {path.stat().st_size // 1000} kB")


# --- the load --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def load(stack: LaunchedStack) -> AsyncIterator[None]:
    """Keeps clients busy during the block."""
    rng = random.Random(7)
    beginnings = [words(rng, rng.randint(*BEGINNING_CHARS)) for _ in range(NUM_BEGINNINGS)]
    async with httpx.AsyncClient(base_url=stack.url, timeout=REQUEST_TIMEOUT_S) as http:
        clients = [asyncio.create_task(client(http, stack.model, beginnings, i)) for i in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def client(http: httpx.AsyncClient, model: str, beginnings: list[str], seed: int) -> None:
    """Sends one request after the other, with pauses as long as a person needs to read."""
    rng = random.Random(seed)
    name = [name for name, count in KEYS.items() for _ in range(count)][seed % NUM_CLIENTS]
    headers = {"Authorization": f"Bearer {secret_of(name)}"}
    while True:
        body = {
            "model": model,
            "prompt": rng.choice(beginnings) + words(rng, rng.randint(40, 600)),
            "max_tokens": int(rng.lognormvariate(4.8, 0.8)) + 8,
            "temperature": 0.4,
            "ignore_eos": True,
        }
        (await http.post("/v1/completions", json=body, headers=headers)).raise_for_status()
        await asyncio.sleep(rng.uniform(0.0, 1.5))


def words(rng: random.Random, num_chars: int) -> str:
    """Returns text that resembles Python, of about that length."""
    text = ""
    while len(text) < num_chars:
        text += rng.choice(WORDS) + rng.choice("     \n(),:.")
    return text


if __name__ == "__main__":
    sys.exit(main())
