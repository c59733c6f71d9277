"""Requests from pages of other sites, or with host names that only look local, are refused on every route."""

import ipaddress

import pytest

from router.config import ModelSource, RouterConfig
from testing.router.scripted_router import MODEL, raw
from testing.router.scripted_servers import saying
from wire.errors import ConfigError
from wire.http.authority import Authority
from wire.http.cross_site import AllowedHosts

TOKEN = "t" * 40
ROUTES = ("/v1/models", "/healthz", "/readyz", "/health", "/metrics", "/metrics/process", "/openapi.json",
          "/admin/ui", "/admin/ui/main.js", "/admin/v1/workers", "/v1/nothing")  # fmt: skip
EVIL = {"Origin": "https://evil.example"}
BODY = f'{{"model": "{MODEL}", "prompt": "hello", "max_tokens": 1}}'.encode()


@pytest.fixture
async def stack(make_stack, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    stack = await make_stack(admin_token_file=tmp_path / "token")
    stack.decode[0].script = saying([300])
    return stack


async def post(stack, **headers: str):
    """As a browser posts a Blob that has no type: without Content-Type, so without asking first."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await stack.client.post("/v1/completions", content=BODY, headers=named)
    return answer.status_code, answer


# --- origins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "nonsense"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Site": "same-origin, cross-site"},
    ],
)
async def test_a_post_of_another_site_is_refused_before_anything_is_done(stack, headers):
    status, answer = await post(stack, **headers)
    assert status == 403
    error = answer.json()["error"]
    assert error["code"] == "origin_not_allowed"
    assert "--cors-origin" in error["message"]
    assert "X-Request-Id" in answer.headers
    assert not stack.decode[0].submitted


async def test_clients_that_are_no_browsers_and_pages_of_the_router_itself_are_served(stack):
    own = stack.url
    for headers in (
        {},
        {"Origin": own},
        {"Origin": own, "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "http://localhost", "Host": "localhost"},
        {"Origin": "http://localhost", "Host": "localhost:80"},
        {"Origin": "https://LOCALHOST:443", "Host": "localhost"},
        {"Origin": "http://[::1]:8000", "Host": "[::1]:8000"},
    ):
        status, answer = await post(stack, **headers)
        assert status == 200, (headers, answer.text)


async def test_every_route_refuses_other_sites(stack):
    for path in ROUTES:
        for headers in (EVIL, {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}):
            for method in ("GET", "HEAD", "POST", "OPTIONS"):
                answer = await stack.client.request(method, path, headers=headers)
                assert answer.status_code == 403, (method, path, headers)


async def test_a_link_on_another_site_may_lead_to_the_dashboard(stack):
    clicked = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert (await stack.client.get("/admin/ui", headers=clicked)).status_code == 200
    framed = clicked | {"Sec-Fetch-Dest": "iframe"}
    assert (await stack.client.get("/admin/ui", headers=framed)).status_code == 403


async def test_an_origin_that_is_named_is_served(make_stack):
    stack = await make_stack(cors_origins=("https://chat.example.com",))
    stack.decode[0].script = saying([300])
    page = {"Origin": "https://chat.example.com", "Sec-Fetch-Site": "cross-site"}
    status, answer = await post(stack, **page)
    assert (status, answer.headers["access-control-allow-origin"]) == (200, page["Origin"])
    assert (await post(stack, **EVIL))[0] == 403
    stack = await make_stack(cors_origins=("*",))
    stack.decode[0].script = saying([300])
    assert [(await post(stack, **one))[0] for one in (EVIL, {"Origin": "null"})] == [200, 200]


# --- hosts -----------------------------------------------------------------------------------------


async def test_a_name_that_only_points_here_is_refused_on_every_route(stack):
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "10.0.0.1",
        "[fe80::1]",
        "a b",
    ):
        for path in ROUTES:
            answer = await stack.client.get(path, headers={"Host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), path
    assert "--allowed-host" in answer.json()["error"]["message"]
    assert (await post(stack, Host="evil.example"))[0] == 403


async def test_names_of_this_machine_are_served(stack):
    for host in (
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "a.localhost",
        "127.0.0.1",
        "127.9.9.9:80",
        "[::1]:1",
    ):
        assert (await stack.client.get("/v1/models", headers={"Host": host})).status_code == 200, host


async def test_requests_without_a_host(stack):
    line = b"GET /healthz HTTP/1.%d\r\nConnection: close\r\n%b\r\n"
    assert b" 200 " in await raw(stack.url, line % (0, b""))
    assert b" 400 " in await raw(stack.url, line % (1, b""))
    assert b" 400 " in await raw(stack.url, line % (1, b"Host: localhost\r\nHost: localhost\r\n"))
    assert b" 403 " in await raw(stack.url, line % (1, b"Host:\r\n"))
    assert b" 403 " in await raw(stack.url, line % (0, b"Host: evil.example\r\n"))


async def test_a_router_that_others_reach_takes_any_name_until_some_are_given(make_stack):
    stack = await make_stack(host="0.0.0.0")
    for host in ("api.example.com", "10.0.0.1", "evil.example"):
        assert (await stack.client.get("/v1/models", headers={"Host": host})).status_code == 200
    stack = await make_stack(host="0.0.0.0", allowed_hosts=("api.example.com", "*.cluster.local"))
    for host, expected in (
        ("api.example.com:443", 200),
        ("router.ns.svc.cluster.local", 200),
        ("cluster.local", 403),
        ("evil.example", 403),
        ("10.0.3.4:8000", 200),  # a kubelet's probe
        ("localhost", 200),
    ):
        answer = await stack.client.get("/readyz", headers={"Host": host})
        assert answer.status_code == expected, host


def config(**changes) -> RouterConfig:
    return RouterConfig(models=(ModelSource("m", "."),), decode_addresses=("a:1",), **changes)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_router_on_loopback_adds_names_that_are_given(host):
    allowed = AllowedHosts.of(host, ("box.example", "[fd00::1]"))
    names = ("localhost", "box.example", "[fd00::1]:80")
    assert [allowed.takes(name) for name in names] == [True] * 3
    assert not allowed.takes("other.example")
    assert AllowedHosts.of(host, ("*",)) is None


@pytest.mark.parametrize("name", ["", "http://a", "a:80", "*a.example", "a/b", "a.*", "*."])
def test_a_name_that_could_never_match_is_refused_at_the_start(name):
    with pytest.raises(ConfigError, match="allowed_host"):
        config(allowed_hosts=(name,))


def test_authorities_are_parsed_as_browsers_write_them():
    parse = Authority.parse
    assert parse("A.example.:80") == Authority("a.example", 80)
    assert parse("[::1]:8000") == Authority(str(ipaddress.ip_address("::1")), 8000)
    assert parse("a.example") == Authority("a.example", None)
    for text in ("", ":80", "a:b", "a:99999", "user@a", "a b", "[::1", "::1", "a/b", "a:80:90"):
        assert parse(text) is None, text
