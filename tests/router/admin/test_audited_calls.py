"""What the audit log tells of calls of the admin API."""

import json

import pytest

from router.access.api_keys import ApiKey, digest_of, new_key
from router.access.key_file import key_line
from router.audit.verification import verify
from testing.conditions import until
from testing.router.admin_calls import TOKEN, get, ids, patch, post

VIEWER = new_key()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text(key_line(ApiKey("viewer", digest_of(VIEWER), role="view")))
    return file


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(path, event):
    return [record for record in records(path) if record["event"] == event]


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


async def test_an_act_is_in_the_file_before_it_is_answered_with_before_and_after(make_admin_stack, path):
    stack = await make_admin_stack(audit_log=path, num_decode=2)
    await patch(stack, max_queue=7)
    (call,) = of(path, "call")
    assert call | {"who": "admin:token", "role": "configure", "from": "127.0.0.1", "status": 200} == call
    assert call["what"] == "PATCH /admin/v1/config"
    assert (call["before"], call["after"]) == ({"max_queue": 1024}, {"max_queue": 7})
    worker = (await ids(stack))[0]
    await post(stack, f"/workers/{worker}/drain")
    await post(stack, f"/workers/{worker}/undrain")
    assert (await stack.client.delete(f"/admin/v1/workers/{worker}")).status_code == 200
    await post(stack, "/workers", 400, address="nonsense", role="decode")
    await patch(stack, 400, max_queue=-1)
    acts = [call for call in of(path, "call") if not call["what"].startswith("GET")]
    assert [act["status"] for act in acts] == [200, 200, 200, 200, 400, 400]
    assert [act.get("after", {}) and act["after"]["draining"] for act in acts[1:3]] == [True, False]
    assert acts[3]["before"]["address"] == stack.decode[0].address
    assert acts[3]["after"] is None
    assert "after" not in acts[4]
    assert acts[4]["asked"] == {"role": "decode", "address": "nonsense"}
    assert not [act for act in acts[:4] if "asked" in act]
    assert not verify([path]).fault


async def test_an_address_that_was_tried_is_named_and_cut_if_it_is_long(make_admin_stack, path):
    stack = await make_admin_stack(audit_log=path)
    await post(stack, "/workers", 400, address=stack.decode[0].address, role="prefill")
    await post(stack, "/workers", 400, address="a" * 5000, role="decode")
    first, second = (call["asked"]["address"] for call in of(path, "call"))
    assert first == stack.decode[0].address
    assert second == "a" * 256 + "…"


async def test_views_are_counted_and_refusals_are_named_without_what_was_sent(make_admin_stack, path, keys):
    stack = await make_admin_stack(audit_log=path, api_keys_file=keys)
    for _ in range(5):
        await get(stack, "/config")
        for headers in ({}, bearer("wrong-secret")):
            answer = await stack.client.get("/admin/v1/config", headers={"Authorization": "", **headers})
            assert answer.status_code == 401
        assert (await stack.complete()).status_code == 401
    refused = await stack.client.patch("/admin/v1/config", json={}, headers=bearer(VIEWER))
    assert refused.status_code == 403
    await until(lambda: of(path, "refused") and of(path, "call"))
    assert len(of(path, "call")) == 1
    await stack.exits.aclose()
    views = of(path, "call")
    assert [view.get("repeated") for view in views] == [None, 4]
    assert all(view["what"] == "GET /admin/v1/config" for view in views)
    refusals = of(path, "refused")
    assert [refusal.get("repeated") for refusal in refusals] == [None, None, None, 9, 4]
    assert "needs the role configure, and 'viewer' has the role view" in refusals[2]["why"]
    assert records(path)[-1]["event"] == "stopped"
    assert "wrong-secret" not in path.read_text()
    assert TOKEN not in path.read_text()
    assert not verify([path]).fault
