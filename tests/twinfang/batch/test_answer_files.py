"""The files of answers and errors: what is done is read from them, wherever their end was cut."""

from __future__ import annotations

import json
import resource

import pytest

from testing.batch_files import lines, request, write_requests
from twinfang.batch.answer_files import AnswerFiles, DoneLines, OutputError
from twinfang.batch.answer_line import Answer, answer_line
from twinfang.batch.input_file import check_input
from twinfang.batch.unfinished import UnfinishedError

DONE = Answer(200, "req", {"choices": [], "usage": {"completion_tokens": 3}})
FAILED = Answer(400, "req", {"error": {"message": "no"}})


class Batch:
    """An input of six lines, and answers to them."""

    def __init__(self, folder):
        self.output, self.errors = folder / "out.jsonl", folder / "errors.jsonl"
        self.checked = check_input(write_requests(folder / "in.jsonl", map(request, range(6))))
        self.requests = list(self.checked.requests(DoneLines(6)))

    def opened(self):
        return AnswerFiles(self.output, self.errors, self.checked)

    def add(self, files, number, answer=DONE):
        line = answer_line(self.checked.digest, self.requests[number - 1], answer)
        files.add(number, line, is_error=answer.is_error)

    def left(self):
        files = self.opened()
        files.close()
        return [one.number for one in self.checked.requests(files.done)]


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path)


def test_lines_have_the_form_of_openai_s(batch):
    files = batch.opened()
    batch.add(files, 1)
    batch.add(files, 2, FAILED)
    batch.add(files, 3, Answer(None, error_code="connection_lost", error_message="gone"))
    files.sync()
    files.close()
    (answer,) = lines(batch.output)
    assert answer.pop("id").startswith("batch_req_")
    assert answer == {
        "custom_id": "line-0",
        "response": {"status_code": 200, "request_id": "req", "body": DONE.body},
        "error": None,
    }
    refused, lost = lines(batch.errors)
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert (lost["response"], lost["error"]) == (None, {"code": "connection_lost", "message": "gone"})


def test_wherever_the_last_line_was_cut_the_others_count_and_it_is_sent_again(batch):
    files = batch.opened()
    batch.add(files, 4)
    start = batch.output.stat().st_size
    batch.add(files, 2)
    files.close()
    whole = batch.output.read_bytes()
    for size in range(start, len(whole)):
        batch.output.write_bytes(whole[:size])
        assert batch.left() == [1, 2, 3, 5, 6]
        assert batch.output.read_bytes() == whole[:start]
    batch.output.write_bytes(whole)
    assert batch.left() == [1, 3, 5, 6]
    batch.output.write_bytes(whole + bytes(100))  # a machine lost power
    assert batch.left() == [1, 3, 5, 6]


def test_errors_count_as_done_and_are_tried_again_if_their_file_is_removed(batch):
    files = batch.opened()
    assert not batch.errors.exists()
    batch.add(files, 1)
    batch.add(files, 2, FAILED)
    files.close()
    assert batch.left() == [3, 4, 5, 6]
    batch.errors.unlink()
    assert batch.left() == [2, 3, 4, 5, 6]


def test_answers_and_errors_may_share_a_file(batch):
    batch.errors = batch.output
    files = batch.opened()
    batch.add(files, 1)
    batch.add(files, 2, FAILED)
    files.close()
    again = batch.opened()
    assert (again.num_answers, again.num_errors) == (1, 1)
    again.close()
    assert len(lines(batch.output)) == 2


def test_a_changed_input_is_not_continued(batch, tmp_path):
    files = batch.opened()
    batch.add(files, 1)
    files.close()
    before = batch.output.read_bytes()
    batch.checked = check_input(write_requests(tmp_path / "in.jsonl", map(request, range(7))))
    with pytest.raises(OutputError, match=r"line 1 of .*out.jsonl answers another input than .*in.jsonl, or"):
        batch.opened()
    assert batch.output.read_bytes() == before


@pytest.mark.parametrize("content", ["hello\n", "hello", '{"id": "x"}\n', "[]\n", '{"id":"batch_reqs'])
def test_a_file_of_something_else_is_left_alone(batch, content):
    batch.output.write_text(content)
    with pytest.raises(OutputError, match=r"line 1 of .*out.jsonl is no answer of a batch: give a new file"):
        batch.opened()
    assert batch.output.read_text() == content


def test_a_line_that_is_answered_twice_is_named(batch):
    files = batch.opened()
    batch.add(files, 3)
    files.close()
    batch.output.write_bytes(batch.output.read_bytes() * 2)
    with pytest.raises(OutputError, match=r"line 2 of .* answers line 3 of .*, which is answered already"):
        batch.opened()


def test_two_batches_can_not_write_one_file(batch):
    files = batch.opened()
    with pytest.raises(OutputError, match="is being written by another `twinfang batch`"):
        batch.opened()
    files.close()
    batch.opened().close()


def test_a_full_disk_leaves_whole_lines(batch):
    files = batch.opened()
    batch.add(files, 1)
    size = batch.output.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(UnfinishedError, match="can't be written: File too large; all answers before"):
            batch.add(files, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert batch.output.stat().st_size == size
    files.sync()
    files.close()
    assert [json.loads(line)["custom_id"] for line in batch.output.open()] == ["line-0"]
