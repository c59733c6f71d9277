"""All routes of the admin API: who may call them, and how the schema describes them."""

import hashlib

import httpx
from fastapi.routing import APIRoute

from testing.conditions import TIMEOUT_S
from testing.router.admin_calls import TOKEN

WITH_BODY = {("POST", "/admin/v1/workers"), ("PATCH", "/admin/v1/config"), ("POST", "/admin/v1/purge")}


def routes_of(app):
    """Paths, with something for their parameters, and methods of all routes, however they were added."""
    schema = app.openapi()
    return [
        (method.upper(), path.replace("{request_id}", "x").replace("{worker_id}", "x"))
        for path, methods in schema["paths"].items()
        for method in methods
        if path.startswith("/admin/v1")
    ]


async def test_no_admin_route_answers_without_its_token(make_admin_stack):
    stack = await make_admin_stack()
    found = routes_of(stack.app)
    assert len(found) >= 7
    assert not [
        route
        for route in stack.app.routes
        if isinstance(route, APIRoute) and "/admin/v1" in route.path and not route.include_in_schema
    ]
    bad = [
        {},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
    ]
    bad += [
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {hashlib.sha256(TOKEN.encode()).hexdigest()}"},
    ]
    async with httpx.AsyncClient(base_url=stack.url, timeout=TIMEOUT_S) as stranger:
        for method, path in [
            *found,
            ("GET", "/admin/v1"),
            ("GET", "/admin/v1/nothing"),
            ("PUT", "/admin/v1/stats"),
        ]:
            for headers in bad:
                response = await stranger.request(method, path, headers=headers, content=b"{")
                assert response.status_code == 401, (method, path, headers)
                assert response.json()["error"]["code"] == "invalid_admin_token"
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert TOKEN not in response.text
        twice = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer x")]
        assert (await stranger.get("/admin/v1/stats", headers=twice)).status_code == 401
        for path in ("//admin/v1/stats", "/admin/v1/../v1/stats", "/%61dmin/v1/stats", "/admin/v1/stats/"):
            assert (await stranger.get(path)).status_code in (401, 404)
    assert (
        await stack.client.get("/admin/v1/stats", headers={"Authorization": f"bearer {TOKEN}"})
    ).status_code == 200


async def test_without_a_token_file_there_is_no_admin_api(make_stack):
    stack = await make_stack()
    response = await stack.client.get("/admin/v1/workers", headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == 404
    assert not routes_of(stack.app)


async def test_the_schema_describes_every_route(make_admin_stack):
    stack = await make_admin_stack()
    schema = (await stack.client.get("/openapi.json")).json()
    for method, path in routes_of(stack.app):
        named = path.replace("/x", "/{worker_id}" if "workers" in path else "/{request_id}")
        route = schema["paths"][named][method.lower()]
        assert route["security"] == [{"HTTPBearer": []}], path
        assert route["responses"]["401"]["content"]["application/json"]["schema"], path
        assert "422" not in route["responses"], "what can't work is a 400"
        (success,) = [answer for code, answer in route["responses"].items() if code.startswith("2")]
        ((_, content),) = success["content"].items()
        assert content["schema"], path
        assert ("requestBody" in route) == ((method, path) in WITH_BODY), path
