"""How a batch treats an endpoint that is busy, away, broken or strict."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from testing.batch_files import check_each_once, lines, request, write_requests
from testing.conditions import TIMEOUT_S, until
from testing.openai_endpoint import Reply, openai_endpoint
from twinfang.batch.answer_files import AnswerFiles
from twinfang.batch.input_file import check_input
from twinfang.batch.job import Job, JobSettings
from twinfang.batch.progress import Progress
from twinfang.batch.unfinished import UnfinishedError
from twinfang.endpoint.endpoint import Endpoint

NOW = {"Retry-After": "0"}
SETTINGS = JobSettings(concurrency=8, max_retries=2, give_up_after_s=60.0, stop_grace_s=60.0, priority=None)
OBJECTS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat.completion",
    "/v1/responses": "response",
}


def answered(call):
    """A good answer."""
    usage = {"completion_tokens": 1}
    return Reply(200, {"object": OBJECTS[call.path], "usage": usage}, {"X-Request-Id": "theirs"})


class Batch:
    """A batch of ``num_lines`` in ``folder``, and its job on ``url``."""

    def __init__(self, folder, num_lines, url, **settings):
        self.requests = [request(number) for number in range(num_lines)]
        self.output, self.errors = folder / "out.jsonl", folder / "errors.jsonl"
        checked = check_input(write_requests(folder / "in.jsonl", self.requests))
        self.files = AnswerFiles(self.output, self.errors, checked)
        progress = Progress(num_lines, self.files.num_answers, self.files.num_errors)
        endpoint = Endpoint(url, timeout_s=TIMEOUT_S, api_key="sesame")
        self.job = Job(checked, self.files, endpoint, replace(SETTINGS, **settings), progress)

    async def run(self):
        try:
            await asyncio.wait_for(self.job.run(), TIMEOUT_S)
        finally:
            self.files.close()

    def check_all_answered(self):
        check_each_once(self.requests, lines(self.output))
        assert not self.errors.exists()


async def test_lines_are_sent_with_the_key_and_never_more_than_may_run(tmp_path):
    with openai_endpoint(answered) as endpoint:
        batch = Batch(tmp_path, 60, endpoint.url, concurrency=4)
        await batch.run()
    batch.check_all_answered()
    assert endpoint.most_running <= 4
    assert {call.headers["authorization"] for call in endpoint.calls} == {"Bearer sesame"}
    assert sorted(str(call.body) for call in endpoint.calls) == sorted(
        str(one["body"]) for one in batch.requests
    )
    assert {line["response"]["request_id"] for line in lines(batch.output)} == {"theirs"}


async def test_requests_get_a_priority_unless_they_have_one(tmp_path):
    with openai_endpoint(answered) as endpoint:
        batch = Batch(tmp_path, 2, endpoint.url, priority=100)
        write_requests(tmp_path / "in.jsonl", [request(0), request(1, priority=-3)])
        batch.files.close()
        checked = check_input(tmp_path / "in.jsonl")
        batch.files = AnswerFiles(batch.output, batch.errors, checked)
        settings = replace(SETTINGS, priority=100)
        batch.job = Job(checked, batch.files, Endpoint(endpoint.url, TIMEOUT_S), settings, Progress(2, 0, 0))
        await batch.run()
    assert sorted(call.body["priority"] for call in endpoint.calls) == [-3, 100]
    assert all("authorization" not in call.headers for call in endpoint.calls)


def later(status):
    """An answer after which the same request may succeed."""
    return Reply(status, {"error": {"message": "later"}}, NOW)


@pytest.mark.parametrize(
    "reply",
    [
        *(later(status) for status in (429, 502, 503)),
        *(pytest.param(later(status), marks=pytest.mark.exhaustive) for status in (408, 409, 425, 500, 504)),
        Reply(body=None),
        Reply(200, "no object", {}),
    ],
    ids=lambda reply: "cut" if reply.body is None else str(reply.status),
)
async def test_what_may_pass_is_sent_again(tmp_path, reply):
    def answer(call):
        return reply if call.number == 1 and call.body.get("max_tokens", 1) % 3 == 0 else answered(call)

    with openai_endpoint(answer) as endpoint:
        batch = Batch(tmp_path, 30, endpoint.url)
        await batch.run()
    batch.check_all_answered()
    assert len(endpoint.calls) > 30


async def test_a_line_that_always_fails_becomes_an_error_and_the_others_are_answered(tmp_path):
    def answer(call):
        if call.body.get("prompt") == "3 + 4 =":
            return Reply(500, {"error": {"message": "not this one"}}, NOW)
        return answered(call)

    with openai_endpoint(answer) as endpoint:
        batch = Batch(tmp_path, 200, endpoint.url)
        await batch.run()
    (error,) = lines(batch.errors)
    assert error["custom_id"] == "line-3"
    assert error["response"]["status_code"] == 500
    assert error["response"]["body"] == {"error": {"message": "not this one"}}
    check_each_once([one for one in batch.requests if one["custom_id"] != "line-3"], lines(batch.output))


async def test_a_refused_request_is_an_error_at_once(tmp_path):
    def answer(call):
        return Reply(404, {"error": {"message": "no such model"}}, {"X-Request-Id": "r"})

    with openai_endpoint(answer) as endpoint:
        batch = Batch(tmp_path, 5, endpoint.url)
        await batch.run()
    assert len(endpoint.calls) == 5
    assert [line["response"]["status_code"] for line in lines(batch.errors)] == [404] * 5
    assert {line["response"]["request_id"] for line in lines(batch.errors)} == {"r"}
    assert lines(batch.output) == []


async def test_a_refused_key_ends_the_batch_and_makes_no_errors(tmp_path):
    with openai_endpoint(lambda call: Reply(401, {"error": {"message": "who?"}})) as endpoint:
        batch = Batch(tmp_path, 50, endpoint.url)
        with pytest.raises(UnfinishedError, match=r"refuses the API key: HTTP 401: who\?; give another with"):
            await batch.run()
    assert lines(batch.output, batch.errors) == []


async def test_an_endpoint_that_is_away_ends_the_batch_which_can_go_on_later(tmp_path):
    is_away = threading.Event()

    def answer(call):
        if len(endpoint.calls) > 20:
            is_away.set()
        return Reply(body=None) if is_away.is_set() else answered(call)

    with openai_endpoint(answer) as endpoint:
        batch = Batch(tmp_path, 60, endpoint.url, give_up_after_s=0.2, max_retries=50)
        with pytest.raises(
            UnfinishedError, match=r"no line was answered for 0.2 s: the connection to .* lost"
        ):
            await batch.run()
    assert 0 < len(lines(batch.output)) <= 20
    assert not batch.errors.exists()
    batch = Batch(tmp_path, 60, endpoint.url, give_up_after_s=0.2, max_retries=0)
    with pytest.raises(UnfinishedError, match=r"no line was answered for 0.2 s: can't connect to"):
        await batch.run()  # nobody listens any more
    with openai_endpoint(answered) as again:
        batch = Batch(tmp_path, 60, again.url)
        await batch.run()
    batch.check_all_answered()


async def test_an_endpoint_that_always_fails_costs_one_line_a_call(tmp_path):
    """A proxy in front of an endpoint that is away answers 502."""
    with openai_endpoint(lambda call: Reply(502, {}, NOW)) as endpoint:
        for num_errors in (1, 2):
            batch = Batch(tmp_path, 60, endpoint.url, give_up_after_s=0.5, max_retries=0, concurrency=1)
            with pytest.raises(UnfinishedError, match=r"no line was answered for 0\.5 s: HTTP 502"):
                await batch.run()
            assert len(lines(batch.errors)) == num_errors
    assert lines(batch.output) == []


async def test_a_stop_lets_running_answers_end_and_a_second_one_does_not(tmp_path):
    may_answer = threading.Event()

    def answer(call):
        assert may_answer.wait(TIMEOUT_S)
        return answered(call)

    with openai_endpoint(answer) as endpoint:
        batch = Batch(tmp_path, 60, endpoint.url)
        running = asyncio.create_task(batch.run())
        await until(lambda: endpoint.num_running == 8, "all that may run are sent")
        batch.job.request_stop()
        may_answer.set()
        await running
        assert len(lines(batch.output)) == 8
        assert len(endpoint.calls) == 8

        may_answer.clear()
        batch = Batch(tmp_path, 60, endpoint.url)
        running = asyncio.create_task(batch.run())
        await until(lambda: endpoint.num_running == 8, "all that may run are sent")
        batch.job.request_stop()
        batch.job.request_stop()
        await running
        may_answer.set()
    assert len(lines(batch.output)) == 8
    with openai_endpoint(answered) as again:
        batch = Batch(tmp_path, 60, again.url)
        await batch.run()
    batch.check_all_answered()


async def test_the_grace_of_a_stop_ends(tmp_path):
    may_answer = threading.Event()
    with openai_endpoint(lambda call: may_answer.wait(TIMEOUT_S) and answered(call)) as endpoint:
        batch = Batch(tmp_path, 9, endpoint.url, stop_grace_s=0.05)
        running = asyncio.create_task(batch.run())
        await until(lambda: endpoint.num_running == 8, "all that may run are sent")
        batch.job.request_stop()
        await running
        may_answer.set()
    assert lines(batch.output, batch.errors) == []
