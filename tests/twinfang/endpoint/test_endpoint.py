"""Which URL an endpoint has, and which key it gets."""

from __future__ import annotations

import argparse

import pytest

from testing.openai_endpoint import Reply, openai_endpoint
from twinfang.endpoint.endpoint import Endpoint, endpoint_of
from twinfang.endpoint.flags import base_url
from twinfang.endpoint.model_list import EndpointError, ModelList, model_list
from twinfang.endpoint.refusal import message_of
from wire.errors import ConfigError

BOTH = {"TWINFANG_API_KEY": "ours", "OPENAI_API_KEY": "theirs"}
OPENAI = {"OPENAI_API_KEY": "theirs"}


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        ("https://models.example.com/openai/v2", "https://models.example.com/openai/v2"),
    ],
)
def test_a_base_url_is_what_openai_s_clients_take(text, url):
    assert base_url(text) == url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("127.0.0.1:8000", "expected a URL"),
        ("http://me:secret@host/v1", "--api-key-file"),
        ("http://host:80000", "port"),
        ("http://host/v1?key=secret", "without"),
    ],
)
def test_another_url_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        base_url(text)


def key_for(url, environment, path=None):
    values = argparse.Namespace(base_url=url, timeout=1.0, api_key_file=path)
    return endpoint_of(values, environment).api_key


def test_a_key_comes_from_its_file_else_from_the_environment(tmp_path):
    path = tmp_path / "key"
    path.write_text("of-the-file\n")
    assert key_for("http://host/v1", BOTH, path) == "of-the-file"
    assert key_for("http://host/v1", BOTH) == "ours"
    assert key_for("http://host/v1", {}) == ""
    assert "of-the-file" not in repr(Endpoint("http://host/v1", 1.0, "of-the-file"))


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("https://api.example.com/v1", "theirs"),
        ("http://127.0.0.1:8000/v1", "theirs"),
        ("http://[::1]:8000/v1", "theirs"),
        ("http://localhost:8000/v1", "theirs"),
        ("http://10.0.0.5:8000/v1", ""),
        ("http://localhost.example.com/v1", ""),
    ],
)
def test_openai_s_key_is_sent_by_tls_or_on_this_machine_only(url, key):
    assert key_for(url, OPENAI) == key


@pytest.mark.parametrize("content", ["", " \n", "two words", "two\nlines", "schlüssel"])
def test_a_file_without_a_key_is_refused(tmp_path, content):
    path = tmp_path / "key"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path}"):
        key_for("http://host/v1", {}, path)


def test_models_are_listed_and_a_router_of_ours_is_known():
    with openai_endpoint(lambda call: Reply(200, {})) as endpoint:
        assert model_list(Endpoint(endpoint.url, 9.0)) == ModelList(("large", "small"), is_ours=False)
    with openai_endpoint(lambda call: Reply(200, {}), owner="twinfang") as endpoint:
        assert model_list(Endpoint(endpoint.url, 9.0)).is_ours
    with pytest.raises(
        EndpointError, match=r"can't connect to .*; `twinfang up` starts a server, `base_url`"
    ):
        model_list(Endpoint(endpoint.url, 9.0))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "too long"}}', "HTTP 400: too long"),
        (b'{"error": "too long"}', "HTTP 400: too long"),
        (b'{"detail": "too long"}', "HTTP 400: too long"),
        (b"<html>\n too\x1b[31m long", "HTTP 400: <html> too [31m long"),
        (b"x" * 600, f"HTTP 400: {'x' * 500}…"),
    ],
)
def test_the_message_of_a_refusal_is_one_line_without_control_characters(body, said):
    assert message_of(400, body) == said
