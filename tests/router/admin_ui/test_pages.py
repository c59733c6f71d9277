"""The dashboard's files: who gets them, and under which policy. tests/end_to_end tests what the page does."""

import re
from pathlib import Path

import pytest

from router.admin_ui import pages

STATIC = Path(pages.__file__).parent / "static"


@pytest.fixture
async def ui(make_stack, tmp_path):
    """Client of a router with an admin API; it sends no token."""
    token = tmp_path / "admin-token"
    token.write_text("a-token-for-tests-0123456789\n")
    return (await make_stack(admin_token_file=token)).client


async def test_the_page_and_all_its_files_come_under_a_policy_that_runs_nothing_else(ui):
    for name in ("", *(f"/{name}" for name in pages.ASSETS)):
        response = await ui.get(f"/admin/ui{name}")
        assert response.status_code == 200, name
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    assert (await ui.get("/admin/ui/main.js")).headers["content-type"] == "text/javascript; charset=utf-8"


async def test_a_file_that_has_not_changed_is_not_sent_again(ui):
    etag = (await ui.get("/admin/ui")).headers["etag"]
    again = await ui.get("/admin/ui", headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert (await ui.get("/admin/ui", headers={"If-None-Match": '"another"'})).status_code == 200


async def test_nothing_but_these_files_can_be_had(ui):
    names = ("nothing.js", "..%2fpages.py", "%2e%2e/pages.py", "vendor", "main.js%00", "//etc/passwd")
    for name in names:
        assert (await ui.get(f"/admin/ui/{name}")).status_code == 404, name
    slash = await ui.get("/admin/ui/")
    assert (slash.status_code, slash.headers["location"]) == (307, "../ui")


async def test_without_an_admin_token_there_is_no_page(make_stack):
    stack = await make_stack()
    for path in ("/admin/ui", "/admin/ui/", "/admin/ui/main.js", "/admin/v1/workers"):
        assert (await stack.client.get(path)).status_code == 404


def test_files_name_each_other_and_no_other_host():
    """What the page loads is there and what is there is loaded; no address leads elsewhere."""
    loaded = {pages.PAGE, "vendor/preact.LICENSE"}
    for path in STATIC.rglob("*.*"):
        text = path.read_text()
        if path.suffix != ".LICENSE":  # names of XML namespaces are no addresses
            assert not re.search(r"https?://(?!www\.w3\.org/)|[\"']//", text), path.name
        loaded |= set(re.findall(r"[\"']ui/([\w./]+)[\"']", text))
        loaded |= set(re.findall(r"from \"\./([\w./]+)\"", text))
    assert loaded == set(pages.ASSETS)


def test_no_script_of_ours_can_make_markup_of_text():
    sinks = re.compile(r"(inner|outer|Inner)HTML|insertAdjacentHTML|document\.write|\beval\(|Function\(")
    ours = list(STATIC.glob("*.js"))
    assert ours
    for path in ours:
        assert not sinks.search(path.read_text()), path.name
