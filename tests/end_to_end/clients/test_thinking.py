"""Thinking over real processes: it is limited exactly, and grammars begin behind it."""

import json
import shutil

import httpx
import jsonschema
import pytest

from testing.repository import ROOT

MARKS = ("<think>", "</think>")
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
{{ '<think></think>' if enable_thinking is false else '<think>
' }}"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 999}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "ab", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The bundled model, with tokens for the two marks in place of the last two of its vocabulary."""
    folder = tmp_path_factory.mktemp("thinking")
    shutil.copytree(ROOT / "twinfang" / "bundled_model", folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    by_id = {token_id: text for text, token_id in model["vocab"].items()}
    for token_id, mark in zip(sorted(by_id)[-2:], MARKS, strict=True):
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != by_id[token_id]]
        del model["vocab"][by_id[token_id]]
        model["vocab"][mark] = token_id
        added.append(added[0] | {"content": mark, "id": token_id})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def stack(stacks, model_dir):
    drafts = ("--speculative", "3", "--drafter", "ngram")
    return stacks("up", "--model", str(model_dir), "--max-num-seqs", "16", *drafts)


def chat(stack, **fields):
    body = {"messages": [{"role": "user", "content": "def sort(items):"}], "max_tokens": 40} | fields
    reply = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60.0)
    assert reply.status_code == 200, reply.text
    return reply


@pytest.mark.parametrize("budget", [0, 1, 17])
@pytest.mark.parametrize(
    "speculate", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["drafts", "no-drafts"]
)
def test_a_budget_ends_the_thinking_exactly(stack, budget, speculate):
    fields = {"temperature": 0, "speculate": speculate}
    free = chat(stack, **fields).json()["choices"][0]["message"]["reasoning"]
    made = chat(stack, **fields, thinking_token_budget=budget).json()
    message, usage = made["choices"][0]["message"], made["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == budget
    assert free.startswith(message.get("reasoning", ""))
    assert message["content"]
    streamed = chat(stack, **fields, thinking_token_budget=budget, stream=True).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in streamed.split("\n\n")[:-2]]
    for name in ("reasoning", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message.get(name, "")


def test_a_schema_holds_behind_the_thinking(stack):
    fields = {"temperature": 1.0, "n": 8, "seed": 1, "response_format": FORMAT, "max_tokens": 200}
    made = chat(stack, **fields, thinking_token_budget=17).json()
    assert len({choice["message"]["reasoning"] for choice in made["choices"]}) > 4
    for choice in made["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert 0 < made["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 8 * 17


def test_a_schema_holds_where_the_thinking_is_switched_off(stack):
    made = chat(stack, temperature=0, reasoning_effort="none", response_format=FORMAT).json()
    message = made["choices"][0]["message"]
    assert "reasoning" not in message
    jsonschema.validate(json.loads(message["content"]), SCHEMA)
    assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
