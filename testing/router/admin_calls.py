"""Calls of the admin API's clients."""

from __future__ import annotations

TOKEN = "a-token-for-tests-0123456789"


async def get(stack, path):
    response = await stack.client.get(f"/admin/v1{path}")
    assert response.status_code == 200, response.text
    return response.json()


async def get_whole(stack, path):
    """Return a view that all processes have contributed to."""
    view = await get(stack, path)
    assert not view["missing"]
    return view


async def post(stack, path, status=200, **body):
    response = await stack.client.post(f"/admin/v1{path}", json=body or None)
    assert response.status_code == status, response.text
    return response.json()


async def patch(stack, status=200, **values):
    response = await stack.client.patch("/admin/v1/config", json=values)
    assert response.status_code == status, response.text
    return response.json()


async def ids(stack, role="decode"):
    return [worker["id"] for worker in (await get(stack, "/workers"))["workers"] if worker["role"] == role]
