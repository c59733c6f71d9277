"""Errors tell clients what is missing and when to try again, and show no internals. Operators see all
details, in the log and in the admin API.
"""

import asyncio
import logging

import pytest

from testing.conditions import until
from testing.router.admin_calls import get, ids, post
from testing.router.scripted_router import MODEL, events_of
from testing.router.scripted_servers import failing, hanging, saying
from wire import errors
from wire.errors import CapacityError, InvalidRequestError, TransferError, TwinfangError

INSIDE = "/srv/model/tokenizer.json at 10.1.2.3:8200: UNAVAILABLE: ipv4:10.1.2.3:8200"
HIDDEN = ("127.0.0.1", "10.1.2.3", "/srv", "ipv4:", "UNAVAILABLE", "Describe", "connect", "/admin", "abort)")
SERVER_ERRORS = sorted(
    {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, TwinfangError)
     and cls.http_status >= 500},
    key=lambda cls: cls.__name__,
)  # fmt: skip


def assert_public(message: str) -> None:
    for text in HIDDEN:
        assert text not in message, message


@pytest.mark.parametrize("cls", SERVER_ERRORS)
def test_the_message_of_a_server_error_is_not_for_clients_unless_it_is_said_to_be(cls):
    error = cls(INSIDE)
    assert error.message == INSIDE
    assert error.public
    assert_public(error.public)
    assert errors.error_from_code(cls.code, INSIDE).public == error.public
    assert cls.told("wait a little").public == "wait a little"


def test_what_is_wrong_with_a_request_is_told_to_its_client():
    assert InvalidRequestError("temperature is -1").public == "temperature is -1"


async def test_no_answer_without_servers_names_an_address(make_admin_stack, caplog):
    stack = await make_admin_stack()
    await stack.decode[0].stop()
    await until(lambda: stack.services.pool.not_ready_reason() is not None)
    with caplog.at_level(logging.INFO):
        for stream in (False, True):
            refused = await stack.complete(stream=stream)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert_public(refused.text)
            assert f"no decode server is ready for model '{MODEL}'" in refused.json()["error"]["message"]
        not_ready = await stack.client.get("/readyz")
    assert_public(not_ready.text)
    assert "no decode server is ready" in not_ready.text
    assert stack.decode[0].address in caplog.text
    assert stack.decode[0].address in (await get(stack, "/pools"))["problem"]


async def test_no_answer_without_a_prefill_server_names_an_address(make_stack):
    stack = await make_stack()
    await stack.prefill[0].stop()
    await until(lambda: stack.services.pool.not_ready_reason() is not None)
    for refused in (await stack.complete(), await stack.client.get("/readyz")):
        assert refused.status_code == 503
        assert_public(refused.text)
        assert f"no prefill server is ready for model '{MODEL}'" in refused.text


async def test_a_drain_by_an_operator_is_no_business_of_clients(make_admin_stack):
    stack = await make_admin_stack()
    (worker,) = await ids(stack)
    await post(stack, f"/workers/{worker}/drain")
    for refused in (await stack.complete(), await stack.client.get("/readyz")):
        assert_public(refused.text)
    assert "/undrain" in (await get(stack, "/pools"))["problem"]
    await post(stack, f"/workers/{worker}/undrain")
    assert (await get(stack, "/pools"))["problem"] == ""


@pytest.mark.parametrize("cls", [TransferError, CapacityError, TwinfangError])
async def test_what_a_server_says_of_its_failure_goes_to_the_log_and_to_operators(
    make_admin_stack, caplog, cls
):
    caplog.set_level(logging.DEBUG)  # what repeats is counted, and each is a line for debugging
    stack = await make_admin_stack()
    for after, stream in (((), False), ((), True), ((300,), True)):
        told_once = iter([failing(cls(INSIDE), after=after)])

        async def script(submit, send, told_once=told_once):
            await next(told_once, failing(cls(INSIDE)))(submit, send)  # some are tried again

        stack.decode[0].script = script
        caplog.clear()
        if after:
            told = (await events_of(stack))[-1]["error"]["message"]
        else:
            answer = await stack.complete(stream=stream)
            assert answer.status_code == cls.http_status
            told = answer.json()["error"]["message"]
        assert_public(told)
        newest = (await get(stack, "/requests?limit=1"))["requests"][0]
        assert (newest["error"], newest["error_message"]) == (cls.code, INSIDE)
        request_id = newest["id"].removeprefix("cmpl-")
        assert any(INSIDE in line and request_id in line for line in caplog.messages), (after, stream)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_that_is_lost_under_way_is_not_named(make_stack, role):
    stack = await make_stack()
    stack.decode[0].script = hanging
    if role == "decode":
        started = asyncio.Event()
        request = asyncio.create_task(events_of(stack, started))
        await until(started.is_set)
        await stack.decode[0].stop()
        message = (await request)[-1]["error"]["message"]
    else:
        await stack.prefill[0].stop()
        message = (await stack.complete(prompt=[5, 6, 7])).json()["error"]["message"]
    assert_public(message.replace("connection", ""))


async def test_an_aborted_request_is_not_told_of_the_admin_api(make_admin_stack):
    stack = await make_admin_stack()
    stack.decode[0].script = hanging
    request = asyncio.create_task(stack.complete())
    await until(lambda: stack.decode[0].submitted)
    (running,) = (await get(stack, "/requests"))["requests"]
    await post(stack, f"/requests/{running['id']}/abort")
    answer = await request
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "aborted")
    assert_public(answer.text)


async def test_operators_are_told_what_failed(make_admin_stack, monkeypatch):
    stack = await make_admin_stack()
    stack.decode[0].script = saying([300])
    monkeypatch.setattr("router.fleet.links.server_drain.TIMEOUT_S", 0.05)
    stack.decode[0].may_drain.clear()
    (worker,) = await ids(stack)
    error = (await post(stack, f"/workers/{worker}/drain", 503))["error"]
    assert stack.decode[0].address in error["message"]
