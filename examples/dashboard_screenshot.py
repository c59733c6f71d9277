"""Makes pictures of the dashboard under load: light, dark, and in a phone's size.

    python -m examples.dashboard_screenshot --output docs

Starts `twinfang up` with two prefill and two decode servers and the bundled model. Keeps clients busy for a
minute and a half (prompts that share their beginnings, answers of all lengths), while a headless Chromium
draws `/admin/ui`. The fonts are those of this machine: the page asks for Inter first, then for the system's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from playwright.async_api import Browser, Page, async_playwright

from examples.chromium import MISSING, find_chromium, launch_options
from twinfang.launch import LaunchedStack, launch

FLAGS = ("--prefill", "2", "--decode", "2", "--speculative", "3", "--cache-memory", "0.08")
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
        stack = launch(Path(folder), "up", *FLAGS, "--admin-token-file", str(token_file))
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
        await open_timeline(wide)
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


async def open_timeline(page: Page) -> None:
    """Opens the timeline of a request that has ended."""
    await page.locator("[data-request]", has_text="finished").first.get_by_role("button").first.click()
    await page.locator(".timeline").first.wait_for()


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
    while True:
        body = {
            "model": model,
            "prompt": rng.choice(beginnings) + words(rng, rng.randint(40, 600)),
            "max_tokens": int(rng.lognormvariate(4.8, 0.8)) + 8,
            "temperature": 0.4,
            "ignore_eos": True,
        }
        (await http.post("/v1/completions", json=body)).raise_for_status()
        await asyncio.sleep(rng.uniform(0.0, 1.5))


def words(rng: random.Random, num_chars: int) -> str:
    """Returns text that resembles Python, of about that length."""
    text = ""
    while len(text) < num_chars:
        text += rng.choice(WORDS) + rng.choice("     \n(),:.")
    return text


if __name__ == "__main__":
    sys.exit(main())
