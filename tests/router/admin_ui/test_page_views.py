"""The dashboard's pages besides the overview, in a real browser, on a router with scripted servers."""

from contextlib import asynccontextmanager

import pytest
from playwright.async_api import async_playwright, expect

from examples.chromium import MISSING, find_chromium, launch_options
from router.access.api_keys import ApiKey, digest_of
from router.access.key_file import key_line
from testing.conditions import TIMEOUT_S, until
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import failing, hanging, saying, server_stats
from testing.router.tokenizers import EOS
from wire.errors import UnavailableError

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=MISSING)

TOKEN = "a-token-for-tests-0123456789"
KEY = "twinfang-a-key-for-tests"
MARKUP = "<img src=x onerror=document.title='caught'>"
THINKS = {"chat_template": "{{ messages[-1].content }}{{ '<think>\n' }}{# </think> #}"}
PHONE = {"width": 390, "height": 844}
WIDE = {"width": 1280, "height": 900}
TIMEOUT_MS = 300 * TIMEOUT_S
expect.set_options(timeout=TIMEOUT_MS)
SIDEWAYS = """() => [document.documentElement, ...document.querySelectorAll(".scroll")]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.className || one.tagName)"""
"""What a person would have to scroll sideways."""


@pytest.fixture
async def stack(make_stack, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "keys").write_text(key_line(ApiKey("alice", digest_of(KEY))))
    files = {"admin_token_file": tmp_path / "token", "api_keys_file": tmp_path / "keys"}
    stack = await make_stack(
        num_decode=2, tokenizer_settings=THINKS, marks=("<think>", "</think>"), hold_s=5.0, **files
    )
    stack.client.headers["Authorization"] = f"Bearer {KEY}"
    for server in stack.decode:
        server.stats = server_stats(num_blocks=100, free_blocks=60, cached_blocks=30, cached_states=7)
    return stack


def script_of(stack, text):
    return saying([*stack.tokenizer.encode_now(text), EOS], ends=True)


@asynccontextmanager
async def opened(stack, view, *, may_say=(), **settings):
    """The dashboard at one of its pages. At the end the console is empty, and nothing ran."""
    said = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(**launch_options(find_chromium()))
        page = await (await browser.new_context(**({"viewport": WIDE} | settings))).new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda line: line.text.endswith(tuple(may_say)) or said.append(line.text))
        await page.goto(f"{stack.url}/admin/ui#{view}")
        await page.get_by_label("Admin token").fill(TOKEN)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("status").first).to_have_text("Live")
        yield page
        assert await page.title() == "Twinfang"
        assert await page.locator("img:not([src='ui/icon.svg'])").count() == 0
        await browser.close()
    assert said == []


async def test_a_prompt_is_tried_by_keyboard_alone_and_thinking_stands_apart(stack):
    for server in stack.decode:
        server.script = script_of(stack, f"Hm, {MARKUP}</think>\n\nIt is {MARKUP}")
    async with opened(stack, "overview", may_say=("401 (Unauthorized)",)) as page:
        for _ in range(20):  # from the top of the page to the last of its pages
            if await page.evaluate("document.activeElement.textContent") == "Try it":
                break
            await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await page.get_by_label("Message", exact=True).focus()
        await page.keyboard.type("What is it?")
        await page.get_by_label("Max tokens").fill("100")
        await page.get_by_label("Message", exact=True).focus()
        await page.keyboard.press("Control+Enter")
        alert = page.get_by_role("alert")
        await expect(alert).to_contain_text("You didn't provide an API key")
        await page.get_by_label("API key").focus()
        await page.keyboard.type(KEY)
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("Done.")).to_be_visible()
        answer = page.locator(".trial-answer")
        await expect(answer.locator("> .trial-text")).to_have_text(f"It is {MARKUP}")
        thinking = answer.locator(".trial-thinking")
        await expect(thinking.locator(".trial-text")).to_have_text(f"Hm, {MARKUP}")
        quiet, plain = [
            await one.evaluate("one => getComputedStyle(one).color")
            for one in (thinking, answer.locator("> .trial-text"))
        ]
        assert quiet != plain
        names, values = [await answer.locator(tag).all_inner_texts() for tag in ("dt", "dd")]
        figures = dict(zip(names, values, strict=True))
        assert figures["end"] == "stop"
        assert figures["TTFT"].endswith("s")
        assert int(figures["thinking"]) > 0
        assert int(figures["prompt"]) > 0
        kept = await page.evaluate(
            "JSON.stringify([{ ...sessionStorage }, { ...localStorage }, document.cookie])"
        )
        assert KEY not in kept
        await page.locator("nav a[href='#keys']").click()
        await page.locator("nav a[href='#try']").click()
        await expect(page.get_by_label("API key")).to_have_value(KEY)  # the page's memory
        await page.get_by_role("button", name="Timeline").click()
        await expect(page.get_by_role("dialog")).to_contain_text("chatcmpl-")
        await page.keyboard.press("Escape")
        await page.reload()
        await expect(page.get_by_label("API key")).to_have_value("")


@pytest.mark.exhaustive
async def test_an_answer_can_be_stopped_and_a_completion_has_its_parameters(stack):
    for server in stack.decode:
        server.script = hanging
    async with opened(stack, "try") as page:
        await page.get_by_role("button", name="Completion").click()
        await page.get_by_label("Prompt", exact=True).fill("hello")
        for name, value in (("Max tokens", "9"), ("Temperature", "0.5"), ("Top p", "0.9"), ("Seed", "7")):
            await page.get_by_label(name).fill(value)
        await page.get_by_label("API key").fill(KEY)
        await page.get_by_role("button", name="Send").click()
        await until(lambda: any(server.submitted for server in stack.decode))
        (submit,) = [one for server in stack.decode for one in server.submitted]
        params = submit.params
        assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (9, 0.5, 0.9, 7)
        await page.get_by_role("button", name="Stop").click()
        await expect(page.get_by_text("Stopped.")).to_be_visible()
        await until(lambda: any(server.cancelled for server in stack.decode))


@pytest.mark.exhaustive
async def test_a_timeline_tells_where_an_answer_went_on(stack):
    """Also what a server says of itself is text."""
    stack.decode[0].script = failing(UnavailableError(f"broken {MARKUP}"), after=(300,))
    stack.decode[1].script = script_of(stack, "well")
    failed = None
    for _ in range(4):  # until the turn of the first one
        response = await stack.complete(prompt=[5, 6, 7], max_tokens=4)
        assert response.status_code == 200
        if stack.decode[0].submitted:
            failed = response.json()["id"]
            break
    async with opened(stack, "overview") as page:
        await page.locator(f"[data-request='{failed}'] button").first.click()
        attempts = page.locator(".attempts li")
        await expect(attempts).to_have_count(2)
        workers = [one.worker_id for one in stack.services.pool.workers() if one.pool_role == "decode"]
        await expect(attempts.nth(0)).to_contain_text(f"{workers[0]} failed at")
        await expect(attempts.nth(0)).to_contain_text("It went on")
        await expect(attempts.nth(1)).to_contain_text(workers[1])
        await expect(attempts.nth(1)).to_contain_text("Finished.")


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_caches_and_keys_fit_on_a_phone(stack, scheme):
    stack.decode[0].script = stack.decode[1].script = script_of(stack, "well")
    for _ in range(2):
        assert (await stack.complete(prompt=[5, 6, 7, 8, 9], max_tokens=4)).status_code == 200
    async with opened(stack, "caches", viewport=PHONE, color_scheme=scheme) as page:
        caches = page.locator("[data-cache]")
        await expect(caches).to_have_count(3)
        prefill = caches.first
        await expect(prefill).to_contain_text("80 %")  # 4 of 5 tokens, says the scripted server
        await expect(prefill).to_contain_text("10")
        decode = caches.nth(1)
        await expect(decode.get_by_role("meter", name="KV blocks")).to_have_attribute("aria-valuenow", "40")
        await expect(page.locator(f"[data-model='{MODEL}']")).to_be_visible()
        assert await page.evaluate(SIDEWAYS) == []
        await page.locator("nav a[href='#keys']").click()
        alice = page.locator("[data-key='alice']")
        await expect(alice).to_contain_text("2")
        await expect(alice).to_contain_text("80 %")
        await expect(alice.locator(".limits")).to_have_text("no limits")
        assert await page.evaluate(SIDEWAYS) == []
        await page.locator("nav a[href='#try']").click()
        await expect(page.get_by_label("Message", exact=True)).to_be_visible()
        assert await page.evaluate(SIDEWAYS) == []
