"""A router with an admin API, and what its tests ask of it."""

import pytest

TOKEN = "a-token-for-tests-0123456789"


@pytest.fixture
def make_admin_stack(make_stack, tmp_path):
    """``make_stack`` with an admin API; its client sends the token."""

    async def make(**config):
        path = tmp_path / "admin-token"
        path.write_text(TOKEN + "\n")
        stack = await make_stack(admin_token_file=path, **config)
        stack.client.headers["Authorization"] = f"Bearer {TOKEN}"
        return stack

    return make


async def get(stack, path):
    response = await stack.client.get(f"/admin/v1{path}")
    assert response.status_code == 200, response.text
    return response.json()


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
