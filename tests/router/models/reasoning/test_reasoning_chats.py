"""Chats with a model that thinks: what clients see, and what templates and servers are told."""

import json

import pytest

from router.serving.text_lane import TextLane
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import saying
from testing.router.tokenizers import EOS, with_marks

MARKS = ("<think>", "</think>")
BEGIN, END = (with_marks(*MARKS).token_to_id(mark) for mark in MARKS)
OPEN = "{{ messages[-1].content }}{{ '<think></think>' if enable_thinking is false else '<think>\n' }}"
"""Shows only the last message, and opens the thinking unless it is switched off."""
FREE = "{{ messages[-1].content }}:{# <think> </think> #}"
"""The model decides whether it thinks."""
SAID = "Let me see: 3 < 4.\n</think>\n\nYes, it is."
THINKING, CONTENT = "Let me see: 3 < 4.\n", "Yes, it is."
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.fixture
def thinking_stack(make_stack):
    async def make(template=OPEN, **config):
        settings = {"chat_template": template}
        return await make_stack(tokenizer_settings=settings, marks=MARKS, **config)

    return make


async def told(stack, text, *, stream, per_step=3, **fields):
    """The thinking, the content and the usage."""
    ids = stack.tokenizer.encode_now(text)
    stack.decode[0].script = saying([*ids, EOS], per_step=per_step, ends=True)
    if not stream:
        made = (await stack.chat(**fields)).json()
        messages, usage = [made["choices"][0]["message"]], made["usage"]
    else:
        answer = await stack.chat(**fields, stream=True, stream_options={"include_usage": True})
        events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
        messages = [choice["delta"] for event in events for choice in event["choices"]]
        usage = events[-1]["usage"]
    assert all(message.get("reasoning") == message.get("reasoning_content") for message in messages)
    thinking, content = (
        "".join(message.get(name) or "" for message in messages) for name in ("reasoning", "content")
    )
    return thinking, content, usage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("per_step", [1, 3, 100])
async def test_the_thinking_stands_beside_the_content(thinking_stack, stream, per_step):
    stack = await thinking_stack()
    num_tokens = len(stack.tokenizer.encode_now(THINKING))
    for text, thinking, content, num_thinking in (
        (SAID, THINKING, CONTENT, num_tokens),
        (THINKING, THINKING, "", num_tokens + 1),  # with the token that ends the answer
        ("</think>Yes", "", "Yes", 0),
    ):
        found = await told(stack, text, stream=stream, per_step=per_step)
        assert found[:2] == (thinking, content)
        assert found[2]["completion_tokens_details"] == {"reasoning_tokens": num_thinking}
        assert found[2]["completion_tokens"] == len(stack.tokenizer.encode_now(text)) + 1


async def test_a_lane_writes_the_thinking_and_then_the_content(thinking_stack, monkeypatch):
    stack = await thinking_stack()
    written = []
    of_the_lane = TextLane.take_tokens

    def take_tokens(self, token_ids, now_s):
        written.append((self.watched, *token_ids))
        of_the_lane(self, token_ids, now_s)

    monkeypatch.setattr(TextLane, "take_tokens", take_tokens)
    assert (await told(stack, SAID, stream=True, per_step=1))[:2] == (THINKING, CONTENT)
    ids = stack.tokenizer.encode_now(SAID)
    watched = [token_id for watched, token_id in written if watched]
    assert len(watched) > 0.5 * ids.index(END)
    assert [token_id for watched, token_id in written if not watched][-3:] == ids[-3:]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_thinking_may_be_hidden_or_left_in_the_content(thinking_stack, stream):
    stack = await thinking_stack()
    hidden = await told(stack, SAID, stream=stream, include_reasoning=False)
    assert hidden[:2] == ("", CONTENT)
    assert hidden[2]["completion_tokens_details"]["reasoning_tokens"] > 0
    left = await told(stack, SAID, stream=stream, separate_reasoning=False)
    assert left[:2] == ("", SAID)
    stack = await thinking_stack(reasoning_parser="none")
    unknown = await told(stack, SAID, stream=stream)
    assert unknown[:2] == ("", SAID)
    assert "completion_tokens_details" not in unknown[2]


async def test_a_model_may_begin_to_think_by_itself(thinking_stack):
    stack = await thinking_stack(FREE)
    for stream in (False, True):
        assert (await told(stack, "<think>\n" + SAID, stream=stream))[:2] == (THINKING, CONTENT)
        assert (await told(stack, CONTENT, stream=stream))[:2] == ("", CONTENT)


OFF = ({"reasoning_effort": "none"}, {"enable_thinking": False}, {"thinking": {"type": "disabled"}})


@pytest.mark.parametrize("fields", [*OFF, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_each_field_switches_the_thinking_off(thinking_stack, fields):
    stack = await thinking_stack()
    assert (await told(stack, CONTENT, stream=False, **fields))[:2] == ("", CONTENT)
    submitted = stack.decode[0].submitted[-1]
    assert submitted.params.thinking is None  # the template has switched it off
    # A template without a switch: the server ends the thinking at once.
    stack = await thinking_stack("{{ messages[-1].content }}<think>\n")
    await told(stack, CONTENT, stream=False, **fields)
    thinking = stack.decode[0].submitted[-1].params.thinking
    assert (thinking.budget, thinking.is_open) == (0, True)


@pytest.mark.parametrize("fields", [{"reasoning_effort": "low"}, {"thinking": {"type": "enabled"}}, {}])
async def test_thinking_that_is_not_switched_off_has_no_limit(thinking_stack, fields):
    stack = await thinking_stack()
    assert (await told(stack, SAID, stream=False, **fields))[:2] == (THINKING, CONTENT)
    assert stack.decode[0].submitted[-1].params.thinking is None


@pytest.mark.parametrize("template", [OPEN, FREE])
async def test_a_grammar_begins_behind_the_thinking(thinking_stack, template):
    stack = await thinking_stack(template)
    await told(stack, "</think>{}", stream=False, response_format=SCHEMA)
    params = stack.decode[0].submitted[-1].params
    assert params.grammar is not None
    thinking = params.thinking
    assert (thinking.begin_token_ids, thinking.end_token_ids) == ((BEGIN,), (END,))
    assert (thinking.is_open, thinking.budget) == (template is OPEN, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 17},
        {"thinking_budget": 17},
        {"thinking": {"type": "enabled", "budget_tokens": 17}},
    ],
)
async def test_each_field_limits_the_thinking(thinking_stack, fields):
    stack = await thinking_stack()
    await told(stack, SAID, stream=False, **fields)
    assert stack.decode[0].submitted[-1].params.thinking.budget == 17
    await told(stack, SAID, stream=False, **fields, reasoning_effort="none")
    thinking = stack.decode[0].submitted[-1].params.thinking
    assert thinking is None or thinking.budget == 17
    await told(stack, SAID, stream=False, thinking_token_budget=-1)
    assert stack.decode[0].submitted[-1].params.thinking is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"thinking_token_budget": -2},
            "thinking_token_budget",
            "must be between -1 (no limit) and 2147483648",
        ),
        ({"thinking_budget": 1 << 32}, "thinking_budget", "must be between -1 (no limit) and 2147483648"),
        (
            {"thinking": {"budget_tokens": "a"}},
            "thinking",
            "thinking.budget_tokens must be an integer, got 'a'",
        ),
        ({"thinking": {"type": "deep"}}, "thinking", "must be 'enabled', 'disabled' or 'auto', got 'deep'"),
        (
            {"thinking_token_budget": 5, "thinking_budget": 6},
            "thinking_token_budget",
            "thinking_token_budget is 5 and thinking_budget is 6: give one of them",
        ),
    ],
)
async def test_wrong_budgets_are_refused(thinking_stack, fields, param, message):
    stack = await thinking_stack()
    refused = await stack.chat("hello", **fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert message in refused.json()["error"]["message"]


async def test_a_budget_for_a_model_whose_marks_are_not_known_is_refused(make_stack):
    stack = await make_stack()
    stack.decode[0].script = saying([300])
    refused = await stack.chat("hello", thinking_token_budget=5)
    assert refused.status_code == 400
    assert "--reasoning-parser" in refused.json()["error"]["message"]
    assert (await stack.chat("hello", reasoning_effort="none", max_tokens=1)).status_code == 200


async def test_earlier_thinking_reaches_the_template(thinking_stack):
    template = "{% for m in messages %}[{{ m.reasoning_content or '' }}|{{ m.content }}]{% endfor %}<think>"
    stack = await thinking_stack(template)
    stack.decode[0].script = saying([END, EOS], ends=True)
    for said in ({"content": "b", "reasoning": "a"}, {"content": "<think>\na\n</think>\n\nb"}):
        messages = [{"role": "assistant", **said}, {"role": "user", "content": "c"}]
        answer = await stack.client.post("/tokenize", json={"messages": messages})
        text = stack.tokenizer.decode(answer.json()["tokens"], skip_special_tokens=False)
        assert text == "[a|b][|c]<think>"


async def test_earlier_thinking_counts_as_text_of_the_prompt(thinking_stack):
    stack = await thinking_stack()
    long = {"role": "assistant", "content": "b", "reasoning": "a" * 100_000}
    refused = await stack.client.post("/v1/chat/completions", json={"messages": [long]})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "100001 characters" in refused.json()["error"]["message"]


async def test_the_official_client_gathers_the_whole_answer_from_a_stream(thinking_stack):
    stack = await thinking_stack(OPEN + "{# <tool_call> #}")
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    ids = stack.tokenizer.encode_now(f"I <tool_call> it.</think>\n\nSo:\n{call}")
    stack.decode[0].script = saying([*ids, EOS], per_step=2, ends=True)
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "tools": tools}
    async with stack.openai.chat.completions.stream(**body) as events:
        streamed = (await events.get_final_completion()).choices[0]
    whole = (await stack.openai.chat.completions.create(**body)).choices[0]
    for choice in (streamed, whole):
        message = choice.message
        assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"]
        assert (message.model_extra["reasoning"], message.content) == ("I <tool_call> it.", "So:")
        assert [call.function.name for call in message.tool_calls] == ["look"]
        assert choice.finish_reason == "tool_calls"
