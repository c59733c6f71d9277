"""Which role may make which call of the admin API, and who has which role."""

import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.access.role import ROLES, includes
from router.admin.role_check import role_for
from router.config import TokenIssuer
from testing.router.admin_calls import TOKEN
from testing.router.role_table import BEGIN, END, PAGE, calls, table
from testing.router.scripted_router import samples_of
from testing.router.scripted_servers import saying
from testing.router.token_issuer import AUDIENCE, running_issuer

KEYS = {role: new_key() for role in (*ROLES, None)}


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    lines = [key_line(ApiKey(f"has-{role}", digest_of(key), role=role)) for role, key in KEYS.items()]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def issuer():
    with running_issuer() as running:
        yield running


async def status_of(stack, method, path, headers):
    path = path.replace("{worker_id}", "none").replace("{request_id}", "none")
    async with stack.client.stream(method, path, headers=headers) as response:
        return response.status_code


def test_the_table_of_the_page_is_the_code_s():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown.strip() == table(), "python -m testing.router.role_table writes it anew"


async def test_each_call_is_for_its_roles_alone(make_stack, keys, issuer):
    """By API keys, by tokens of the issuer, and for nobody else."""
    stack = await make_stack(api_keys_file=keys, token_issuer=TokenIssuer(issuer.url, AUDIENCE))
    tokens = {role: issuer.token(twinfang_role=role) for role in KEYS}
    assert len(calls()) >= 16
    for method, path in (*calls(), ("POST", "/admin/v1/added/later"), ("PUT", "/admin/v1/workers")):
        for role in KEYS:
            for presented in (KEYS[role], tokens[role]):
                status = await status_of(stack, method, path, bearer(presented))
                is_allowed = includes(role, role_for(method, path))
                assert (status not in (401, 403)) if is_allowed else status == 403, (method, path, role)
        for headers in ({}, bearer("wrong"), bearer(issuer.token(aud="other", twinfang_role="configure"))):
            assert await status_of(stack, method, path, headers) == 401, (method, path)


async def test_the_admin_token_may_do_everything(make_admin_stack):
    stack = await make_admin_stack()
    for method, path in calls():
        assert await status_of(stack, method, path, bearer(TOKEN)) not in (401, 403)


async def test_there_is_no_admin_api_if_nobody_could_use_it(make_stack, tmp_path):
    path = tmp_path / "keys"
    path.write_text(key_line(ApiKey("alice", digest_of(KEYS[None]))))
    stack = await make_stack(api_keys_file=path)
    assert await status_of(stack, "GET", "/admin/v1/workers", bearer(KEYS[None])) == 404


async def test_a_role_is_told_what_it_lacks(make_stack, keys):
    stack = await make_stack(api_keys_file=keys)
    refused = await stack.client.patch("/admin/v1/config", json={}, headers=bearer(KEYS["view"]))
    error = refused.json()["error"]
    assert error["code"] == "permission_denied"
    assert "needs the role configure, and 'has-view' has the role view" in error["message"]
    missing = await stack.client.get("/admin/v1/config")
    assert missing.headers["WWW-Authenticate"] == "Bearer"


async def test_metrics_show_keys_to_who_may_view_and_to_nobody_else(make_stack, keys, issuer):
    settings = {"api_keys_file": keys, "token_issuer": TokenIssuer(issuer.url, AUDIENCE)}
    stack = await make_stack(**settings)
    stack.decode[0].script = saying([300])
    for presented in (KEYS["view"], issuer.token(sub="acme")):
        stack.client.headers.update(bearer(presented))
        assert (await stack.complete(max_tokens=1)).status_code == 200
    del stack.client.headers["Authorization"]
    for headers in ({}, bearer("wrong"), bearer(KEYS[None])):
        samples = await samples_of(stack, headers)
        assert not [one for one in samples if {"has-view", "tenant:acme"} & set(one)]
        assert samples["twinfang_requests_total", "completed"] == 2
    for headers in (bearer(KEYS["view"]), bearer(issuer.token(twinfang_role="configure"))):
        samples = await samples_of(stack, headers)
        assert samples["twinfang_key_requests_total", "has-view", "completed"] == 1
        assert samples["twinfang_key_requests_total", "tenant:acme", "completed"] == 1


async def test_metrics_may_need_a_role(make_stack, keys):
    stack = await make_stack(api_keys_file=keys, metrics_need_role=True)
    for path in ("/metrics", "/metrics/process"):
        for presented, status in ((None, 401), ("wrong", 401), (KEYS[None], 403), (KEYS["view"], 200)):
            headers = {} if presented is None else bearer(presented)
            assert (await stack.client.get(path, headers=headers)).status_code == status, (path, presented)
    for path in ("/healthz", "/readyz"):
        assert (await stack.client.get(path)).status_code == 200
