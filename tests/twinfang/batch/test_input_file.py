"""What a batch takes as its input, and what it says of a file that it refuses."""

from __future__ import annotations

import json

import pytest

from testing.batch_files import request, write_requests
from twinfang.batch import input_file
from twinfang.batch.answer_files import DoneLines
from twinfang.batch.input_file import InputError, check_input
from twinfang.batch.unfinished import UnfinishedError


def text_of(number, **changes):
    return json.dumps(request(number) | changes)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("\xff", "line 2 is not JSON"),
        ("[]", "line 2 is no JSON object"),
        (text_of(1, custom_id=1), "line 2 has custom_id 1: expected a string of 1 to 1,024"),
        (text_of(1, custom_id=""), 'line 2 has custom_id "": expected'),
        (text_of(1, custom_id="x" * 1025), "xx…: expected a string of 1 to 1,024"),
        (text_of(1, method="GET"), 'line 2 has method "GET": expected POST'),
        (text_of(1, url="/v1/embeddings"), 'line 2 has url "/v1/embeddings": expected /v1/chat/completions,'),
        (text_of(1, url=None), "line 2 has url null"),
        (text_of(1, body="{}"), 'line 2 has body "{}": expected an object'),
        (text_of(1, body={"stream": True}), "line 2 has stream in its body"),
    ],
)
def test_a_line_that_is_no_request_is_named_with_its_fault(tmp_path, line, said):
    path = tmp_path / "in.jsonl"
    path.write_bytes(f"{text_of(0)}\n{line}\n".encode("latin-1"))
    with pytest.raises(InputError) as caught:
        check_input(path)
    assert said in caught.value.message
    assert str(path) in caught.value.message


def test_of_many_bad_lines_ten_are_shown(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("[]\n" * 25)
    with pytest.raises(InputError, match=r"line 10 is no JSON object; 15 more lines are no requests$"):
        check_input(path)


def test_equal_custom_ids_are_refused_and_their_lines_named(tmp_path):
    numbers = [0, 1, 2, 1, 4, 1]
    path = write_requests(tmp_path / "in.jsonl", map(request, numbers))
    with pytest.raises(InputError, match=r"lines 2 and 6 have the same custom_id 'line-1', as 1 others"):
        check_input(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_lines_is_refused(tmp_path, content):
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="has no line"):
        check_input(path)


def test_a_line_without_an_end_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(input_file, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "in.jsonl"
    path.write_text("x" * 2000)
    with pytest.raises(InputError, match="line 1 has more than"):
        check_input(path)


def test_empty_lines_a_byte_order_mark_and_a_missing_line_end_change_nothing(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{text_of(0)}\r\n\n{text_of(1)}".encode())
    checked = check_input(path)
    assert (checked.num_requests, checked.num_lines) == (2, 3)
    assert checked.models == {"bundled_model": 1}
    requests = list(checked.requests(DoneLines(3)))
    assert [(one.number, one.custom_id, one.path) for one in requests] == [
        (1, "line-0", "/completions"),
        (3, "line-1", "/chat/completions"),
    ]


@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_a_file_that_changes_while_it_is_read_ends_the_batch(tmp_path, how):
    path = write_requests(tmp_path / "in.jsonl", map(request, range(3)))
    checked = check_input(path)
    requests = checked.requests(DoneLines(3))
    next(requests)
    other = path if how == "written to" else tmp_path / "other"
    write_requests(other, map(request, range(1, 4)))
    other.replace(path)
    with pytest.raises(UnfinishedError, match="has changed while the batch ran"):
        next(requests)
