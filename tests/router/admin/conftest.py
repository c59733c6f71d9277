"""A router with an admin API, and the calls that its tests send."""

import pytest

from testing.router.admin_calls import TOKEN


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
