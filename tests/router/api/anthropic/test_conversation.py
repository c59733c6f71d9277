"""System prompt, content blocks and tools become the messages and tools of a chat."""

import pytest

from router.api.anthropic.cache_control import CacheMarks
from router.api.anthropic.conversation import chat_messages
from router.api.anthropic.message_body import CountBody
from router.api.anthropic.tools import ToolChoice, chat_tools
from wire.errors import InvalidRequestError

EPHEMERAL = {"type": "ephemeral"}
HELLO = {"role": "user", "content": "hello"}


def text(said, **more):
    return {"type": "text", "text": said, **more}


def calls(*blocks):
    return [HELLO, {"role": "assistant", "content": list(blocks)}]


USE = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "x"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}


def result(**fields):
    return {"type": "tool_result", "tool_use_id": "call_1", **fields}


def translated(messages, system=None):
    return chat_messages(system, messages, CacheMarks())


def test_texts_stay_texts():
    assert translated([HELLO]) == [HELLO]
    assert translated([{"role": "user", "content": [text("a"), text("b", cache_control=EPHEMERAL)]}]) == [
        {"role": "user", "content": "a\nb"}
    ]


@pytest.mark.parametrize("system", ["be brief", [text("be"), text("brief", cache_control=EPHEMERAL)]])
def test_the_system_prompt_is_the_first_message(system):
    said = "be brief" if isinstance(system, str) else "be\nbrief"
    assert translated([HELLO], system) == [{"role": "system", "content": said}, HELLO]


@pytest.mark.parametrize("system", [None, "", []])
def test_an_empty_system_prompt_is_no_message(system):
    assert translated([HELLO], system) == [HELLO]


def test_messages_of_the_same_role_are_one_turn():
    messages = [HELLO, {"role": "user", "content": [text("you there?")]}, *calls(text("yes"))[1:], HELLO]
    assert translated(messages) == [
        {"role": "user", "content": "hello\nyou there?"},
        {"role": "assistant", "content": "yes"},
        HELLO,
    ]


def test_calls_their_results_and_thinking_become_a_chats():
    thinking = {"type": "thinking", "thinking": "where?", "signature": "unsigned"}
    redacted = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    back = {"role": "user", "content": [result(content=[text("a"), text("b")]), text("and now?")]}
    assert translated([*calls(thinking, redacted, text("I look"), USE, text(" there")), back]) == [
        HELLO,
        {
            "role": "assistant",
            "content": "I look there",
            "reasoning_content": "where?",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "a\nb"},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, ""),
        ({"content": "12"}, "12"),
        ({"content": []}, ""),
        ({"content": "no such place", "is_error": True}, "Error: no such place"),
        ({"content": [text("12")], "is_error": False}, "12"),
    ],
)
def test_a_result_may_be_empty_text_or_blocks_or_an_error(fields, content):
    messages = translated([*calls(USE), {"role": "user", "content": [result(**fields)]}])
    assert messages[-1]["content"] == content


def test_what_stands_before_a_result_stays_before_it():
    messages = translated([*calls(USE), {"role": "user", "content": [text("here"), result(content="12")]}])
    assert [message["role"] for message in messages[2:]] == ["user", "tool"]


WRONG = [
    (None, "messages must be a list of at least one message, got None"),
    ([], "messages must be a list of at least one message"),
    (["hello"], "messages[0] must be an object, got 'hello'"),
    (
        [{"role": "tool", "content": ""}],
        "messages[0].role must be 'user', 'assistant' or 'system', got 'tool'",
    ),
    ([{"role": ["user"], "content": ""}], "messages[0].role must be"),
    ([{"role": "user"}], "messages[0].content must be a string or a list of at least one block, got None"),
    ([{"role": "user", "content": []}], "messages[0].content must be a string or a list of at least one"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0] must be an object with a type, got 'a'"),
    ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0] must be an object with a type"),
    (
        [HELLO, {"role": "user", "content": [text("a"), {"type": "image", "source": {}}]}],
        "messages[1].content[1] is of type 'image', which is not supported here: send text or tool_result",
    ),
    ([{"role": "user", "content": [{"type": "document"}]}], "is of type 'document', which is not supported"),
    ([{"role": "user", "content": [USE]}], "is of type 'tool_use', which is not supported here"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a string"),
    (calls({"type": "server_tool_use"}), "messages[1].content[0] is of type 'server_tool_use'"),
    (calls({**USE, "name": ""}), "messages[1].content[0].name must have at least 1 character"),
    (calls({**USE, "name": 5}), "messages[1].content[0].name must be a string, got 5"),
    (calls({**USE, "id": None}), "messages[1].content[0].id must be a string, got None"),
    (calls({**USE, "input": "{}"}), "messages[1].content[0].input must be an object, got '{}'"),
    (calls({"type": "thinking"}), "messages[1].content[0].thinking must be a string"),
    (calls(text("So")), "messages[1] is the assistant's: an answer that continues it is not supported"),
    ([{"role": "user", "content": [result()]}], "tool_use_id is 'call_1', which is the id of no tool_use"),
    (
        [*calls(USE), {"role": "user", "content": [result(content=[{"type": "image"}])]}],
        "messages[2].content[0].content[0] is of type 'image', which is not supported here: send text",
    ),
    (
        [*calls(USE), {"role": "user", "content": [result(is_error="yes")]}],
        "messages[2].content[0].is_error must be true or false, got 'yes'",
    ),
    (
        [{"role": "user", "content": [text("a", cache_control={"type": "forever"})]}],
        "messages[0].content[0].cache_control must be an object of type 'ephemeral'",
    ),
    (
        [{"role": "user", "content": [text("a", cache_control={**EPHEMERAL, "ttl": "2h"})]}],
        "whose ttl, if it has one, is '5m' or '1h'",
    ),
    (
        [{"role": "user", "content": [text("a", cache_control=EPHEMERAL)] * 5}],
        "messages[0].content[4].cache_control is mark number 5 of the request, the limit is 4: mark fewer",
    ),
]


@pytest.mark.parametrize(("messages", "said"), WRONG)
def test_what_is_wrong_is_named(messages, said):
    with pytest.raises(InvalidRequestError) as refused:
        translated(messages)
    assert said in refused.value.message
    assert len(refused.value.message) < 300


def test_a_custom_tool_becomes_a_function():
    tool = {
        "type": "custom",
        "name": "look",
        "description": "Looks.",
        "input_schema": {"type": "object"},
        "strict": True,
        "cache_control": EPHEMERAL,
    }
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}
    assert chat_tools([tool], CacheMarks()) == [{"type": "function", "function": function}]
    bare = {"name": "look", "input_schema": {}}
    assert chat_tools([bare], CacheMarks())[0]["function"] == {"name": "look", "parameters": {}}


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ({}, "tools must be a list"),
        (["look"], "tools[0] must be an object, got 'look'"),
        ([{"type": "web_search_20250305", "name": "w"}], "tools[0] is of type 'web_search_20250305', which"),
        ([{"input_schema": {}}], "tools[0].name must be a string that is not empty, got None"),
        ([{"name": "look"}], "tools[0].input_schema must be an object, the JSON schema"),
        ([{"name": "look", "input_schema": {}, "strict": "yes"}], "tools[0].strict must be true or false"),
        ([{"name": "look", "input_schema": {}, "description": 5}], "tools[0].description must be a string"),
        ([{"name": "look", "input_schema": {}, "cache_control": 5}], "tools[0].cache_control must be"),
    ],
)
def test_a_tool_that_is_wrong_is_named(tools, said):
    with pytest.raises(InvalidRequestError) as refused:
        chat_tools(tools, CacheMarks())
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("said", "choice", "may_repeat"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}, True),
    ],
)
def test_choices_of_tools_have_other_names_in_a_chat(said, choice, may_repeat):
    fields = ToolChoice.model_validate(said).fields()
    assert fields == {"tool_choice": choice, "parallel_tool_calls": may_repeat}


@pytest.mark.parametrize(
    ("thinking", "switch", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 17}, True, 17),
        ({"type": "adaptive", "display": "summarized"}, True, None),
        ({"type": "disabled"}, False, None),
    ],
)
def test_thinking_is_a_switch_of_the_template_and_a_budget(thinking, switch, budget):
    fields = CountBody(messages=[HELLO], thinking=thinking).prompt_fields()
    assert fields["chat_template_kwargs"] == {"enable_thinking": switch, "thinking": switch}
    assert fields.get("thinking_token_budget") == budget


def test_a_clients_own_variables_of_the_template_win():
    body = CountBody(
        messages=[HELLO],
        thinking={"type": "disabled"},
        chat_template_kwargs={"enable_thinking": True, "x": 1},
    )
    assert body.prompt_fields()["chat_template_kwargs"] == {
        "enable_thinking": True,
        "thinking": False,
        "x": 1,
    }


def test_effort_and_format_have_other_names_in_a_chat():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    both = CountBody(messages=[HELLO], output_config={"effort": "max", "format": form}).prompt_fields()
    assert both["reasoning_effort"] == "high"
    said = {"name": "answer", "schema": {"type": "object"}}
    assert both["response_format"] == {"type": "json_schema", "json_schema": said}
    assert CountBody(messages=[HELLO], output_format=form).prompt_fields()["response_format"]
    with pytest.raises(InvalidRequestError, match="give one of them"):
        CountBody(messages=[HELLO], output_config={"format": form}, output_format=form).prompt_fields()
