"""The dashboard in a real browser, with real servers."""

import contextlib
import threading

import httpx
import pytest
from playwright.sync_api import Page, expect, sync_playwright

from examples.chromium import MISSING, find_chromium, launch_options

TOKEN = "a-token-for-tests-0123456789"
MODEL = "<img src=x onerror=document.title='caught'>"
"""Whoever names a model or a request must not get to run anything in the page."""
LONG = {"max_tokens": 1900, "ignore_eos": True, "stream": True}
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
OVERLAPS = """() => [...document.querySelectorAll(".ticks")].flatMap((axis) => {
  const labels = [...axis.querySelectorAll(".tick > span")].map((one) => one.getBoundingClientRect());
  const shown = labels.filter((one) => one.width);
  return shown.filter((one, i) => i && one.left < shown[i - 1].right);
}).length"""
"""Labels of axes that lie upon one another."""
DEADLINE_MS = 60_000
CONNECTION_ERRORS = tuple(
    f"ERR_{error}"
    for error in ("INCOMPLETE_CHUNKED_ENCODING", "CONNECTION_REFUSED", "CONNECTION_RESET", "EMPTY_RESPONSE")
)
"""What Chromium calls a router that was killed: before, while and after it answered."""
TYPED_EARLY = "Autofocus processing was blocked because a document already has a focused element."
"""What Chromium says when the test types before the first frame of a page was drawn."""

expect.set_options(timeout=DEADLINE_MS)
pytestmark = pytest.mark.skipif(find_chromium() is None, reason=MISSING)


@pytest.fixture(scope="module")
def state_file(tmp_path_factory):
    return tmp_path_factory.mktemp("state") / "state.db"


@pytest.fixture(scope="module")
def stack(module_stacks, tmp_path_factory, state_file):
    token_file = tmp_path_factory.mktemp("dashboard") / "admin-token"
    token_file.write_text(TOKEN)
    flags = ("--decode", "2", "--served-model-name", MODEL, "--admin-token-file", str(token_file))
    flags += ("--state-file", str(state_file))
    return module_stacks.slowed("up", *flags)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**launch_options(find_chromium()))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, stack):
    """Opens the dashboard, signed in; at the end the console is empty, nothing was asked of other hosts."""
    problems, contexts = [], []

    def open_page(*, token=TOKEN, size=WIDE, may_say=(), **settings) -> Page:
        context = browser.new_context(
            viewport=size, ignore_https_errors=stack.authority is not None, **settings
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(DEADLINE_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda said: said.text.endswith((TYPED_EARLY, *may_say)) or problems.append(said.text)
        )
        page.on("request", lambda sent: sent.url.startswith(stack.url) or problems.append(sent.url))
        page.goto(f"{stack.url}/admin/ui")
        page.get_by_label("Admin token").fill(token)
        page.keyboard.press("Enter")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="module")
def client(stack):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=stack.url, timeout=60.0, headers=headers) as client:
        yield client


def complete(client, **body):
    body = {"model": MODEL, "prompt": "def fibonacci(n):", "max_tokens": 8, "ignore_eos": True} | body
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text


@contextlib.contextmanager
def long_request(stack, client, request_id):
    """An answer that is under way in the block; yields what ends it, a list of its last lines."""
    body = {"model": MODEL, "prompt": "def fibonacci(n):"} | LONG
    lines, started = [], threading.Event()

    def read():
        headers = {"X-Request-Id": request_id}
        with (
            contextlib.suppress(httpx.TransportError),
            client.stream("POST", "/v1/completions", json=body, headers=headers) as response,
        ):
            for line in response.iter_lines():
                lines.append(line)
                started.set()

    thread = threading.Thread(target=read)
    try:
        with stack.slow_steps():
            thread.start()
            assert started.wait(DEADLINE_MS / 1000)
            yield lines
    finally:
        thread.join(DEADLINE_MS / 1000)
        assert not thread.is_alive()


def decode_workers(page):
    return page.locator(".pool.is-decode [data-worker]")


# --- what it shows ---------------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_a_right_one_taken(open_page):
    page = open_page(token="wrong", may_say=("401 (Unauthorized)",))
    expect(page.get_by_role("alert")).to_contain_text("does not take this token")
    assert page.locator("[data-worker]").count() == 0
    page.get_by_label("Admin token").fill(TOKEN)
    page.get_by_role("button", name="Open the dashboard").click()
    expect(page.get_by_role("status").first).to_have_text("Live")
    page.reload()  # the tab keeps the token
    expect(page.get_by_role("status").first).to_have_text("Live")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Admin token")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


def test_servers_figures_and_requests_are_shown_and_names_stay_text(open_page, client):
    page = open_page()
    expect(page.locator(".pool.is-prefill [data-worker]")).to_have_count(1)
    expect(decode_workers(page)).to_have_count(2)
    expect(page.locator("[data-state=serving]")).to_have_count(3)
    complete(client)  # while the page is there: it comes by the event stream
    row = page.locator("[data-request]", has_text="finished").first
    expect(row).to_contain_text("decode-")
    expect(row.locator(".model")).to_have_text(MODEL)
    expect(page.locator(".header .models")).to_have_text(MODEL)
    expect(page.locator(".histogram .bar").first).to_be_attached()
    assert page.locator("img:not([src='ui/icon.svg'])").count() == 0
    assert page.title() == "Twinfang"


def test_a_request_has_a_timeline(open_page, client):
    complete(client)
    page = open_page()
    page.locator("[data-request] button").first.click()
    dialog = page.get_by_role("dialog")
    bar = dialog.get_by_role("img", name="Whole request")
    expect(bar).to_be_visible()
    for stage in ("prefill", "transfer", "first token", "decode"):
        expect(dialog.get_by_role("cell", name=stage, exact=True)).to_be_visible()
        assert stage in bar.get_attribute("aria-label")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_scrolling_sideways(open_page, client, scheme):
    complete(client)
    page = open_page(size=PHONE, color_scheme=scheme)
    expect(page.locator("[data-request]").first).to_be_visible()
    expect(page.locator(".tick > :visible").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.evaluate(OVERLAPS) == 0
    page.locator("[data-request] button").first.click()
    expect(page.get_by_role("dialog").get_by_role("cell", name="prefill", exact=True)).to_be_visible()
    for name in ("Table of requests", "Stages"):
        table = page.get_by_label(name, exact=True)
        assert table.evaluate("table => table.scrollWidth - table.clientWidth") == 0, name
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(int(part) for part in ground[4:-1].split(",")) / 3
    assert (lightness < 60) == (scheme == "dark")


def test_events_are_read_however_the_network_cuts_them(open_page):
    """Byte by byte: within a character of two bytes, and between the two of an end of line."""
    said = 'event: request\r\ndata: {"id":\r\ndata: "é"}\r\n\r\n: nothing\n\nevent: stats\ndata: 1\n\n'
    read = open_page().evaluate(
        """async (said) => {
          const { eventsOf } = await import("/admin/ui/event_stream.js");
          const bytes = new TextEncoder().encode(said);
          const body = new ReadableStream({ start(out) {
            for (const byte of bytes) out.enqueue(Uint8Array.of(byte));
            out.close();
          } });
          const events = [];
          try {
            for await (const event of eventsOf(new Response(body))) events.push(event);
          } catch (error) {
            events.push(error.message);
          }
          return events;
        }""",
        said,
    )
    request, stats = {"name": "request", "data": {"id": "é"}}, {"name": "stats", "data": 1}
    assert read == [request, stats, "the router ended the stream"]


# --- what it does ----------------------------------------------------------------------------------


def test_a_click_drains_a_server_and_another_takes_it_back(open_page, stack, client):
    page = open_page()
    with long_request(stack, client, "one-that-moves"):
        worker = request_of(client, "cmpl-one-that-moves")["decode_worker"]
        page.get_by_role("button", name=f"Drain {worker}").click()
        expect(page.get_by_role("dialog")).to_contain_text(f"Drain {worker}?")
        page.keyboard.press("Escape")  # nothing happens without a yes
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert state_of(client, worker) == "serving"

        page.get_by_role("button", name=f"Drain {worker}").click()
        page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
        expect(page.locator(f"[data-worker='{worker}'][data-state=drained]")).to_be_visible()
        assert state_of(client, worker) == "drained"
        stack.wait_until(lambda: is_decoded_elsewhere(client, worker), "it goes on at the other one")
        client.post("/admin/v1/requests/cmpl-one-that-moves/abort")
    for _ in range(4):
        complete(client)
    newest = client.get("/admin/v1/requests", params={"limit": 4}).json()["requests"]
    assert worker not in {request["decode_worker"] for request in newest}

    page.get_by_role("button", name=f"Undrain {worker}").click()
    expect(page.locator(f"[data-worker='{worker}'][data-state=serving]")).to_be_visible()
    assert state_of(client, worker) == "serving"


def state_of(client, worker):
    workers = client.get("/admin/v1/workers").json()["workers"]
    return next(one["state"] for one in workers if one["id"] == worker)


def is_decoded_elsewhere(client, worker):
    moved = request_of(client, "cmpl-one-that-moves")
    assert moved["error"] is None
    return moved["state"] == "decode" and moved["decode_worker"] != worker


def request_of(client, request_id):
    return client.get(f"/admin/v1/requests/{request_id}").json()


def test_a_click_aborts_a_request(open_page, stack, client):
    page = open_page()
    with long_request(stack, client, "one-too-long") as lines:
        row = page.locator("[data-request]", has_text="one-too-long")
        row.get_by_role("button", name="Abort").click()
        page.get_by_role("dialog").get_by_role("button", name="Abort", exact=True).click()
        expect(row).to_contain_text("cancelled")
    assert any('"error"' in line for line in lines)


def test_changes_that_can_not_be_saved_are_told_until_they_are(open_page, client, state_file):
    page = open_page()
    expect(page.get_by_role("status").first).to_have_text("Live")
    kept = state_file.rename(state_file.with_name("kept"))
    state_file.mkdir()
    change = {"max_queue": 1000}
    assert "will be lost" in client.patch("/admin/v1/config", json=change).json()["warning"]
    expect(page.get_by_role("alert")).to_contain_text("Not saved: the change holds, but it will be lost")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text(str(state_file))
    state_file.rmdir()
    kept.rename(state_file)
    assert client.patch("/admin/v1/config", json=change).json()["warning"] == ""
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_page_that_loses_its_router_says_so_and_comes_back(open_page, stack):
    """Last in this file: it kills the router, which the supervisor starts again."""
    page = open_page(may_say=CONNECTION_ERRORS)
    expect(page.get_by_role("status").first).to_have_text("Live")
    stack.kill("router")
    expect(page.get_by_role("alert")).to_contain_text("Disconnected")
    expect(page.locator(".is-stale [data-worker]")).to_have_count(3)  # what was known stays
    expect(page.get_by_role("status").first).to_have_text("Live")
    expect(page.locator("[data-state=serving]")).to_have_count(3)
