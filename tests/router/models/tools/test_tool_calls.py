"""Tool calls in chats, in OpenAI's form, made by the model's own choice or because the request requires
them."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as FastTokenizer

from router.models.grammar_checker import GrammarChecker
from router.models.tokenizer import Tokenizer
from router.models.tools.format_names import FORMATS
from router.models.tools.tool_use import wanted_tool_use
from testing.router.scripted_router import MODEL
from testing.router.scripted_servers import saying
from testing.router.tokenizers import EOS, byte_level_backend
from testing.router.tool_calls import SAID, TOOLS

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "maxLength": 5}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
WAIT = {"type": "function", "function": {"name": "wait"}}
HERMES = {"chat_template": "{{ messages[0].content }} <tool_call>"}
PLAIN = {"chat_template": "{{ messages[0].content }}"}
TEXT = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>\n'
TWO = TEXT + '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'


def asking(**fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "tools": [LOOK, WAIT]} | fields


async def told(stack, text, words, *, stream, read=json.loads, **fields):
    """Content, calls by id's place, name and what ``read`` makes of arguments, and the finish reason, as the
    client sees them."""
    stack.decode[0].script = saying([*words.encode_now(text), EOS], per_step=3, ends=True)
    made = await stack.openai.chat.completions.create(**asking(**fields), stream=stream)
    if not stream:
        (choice,) = made.choices
        calls = choice.message.tool_calls or []
        assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
        named = [(call.function.name, read(call.function.arguments)) for call in calls]
        return choice.message.content, named, choice.finish_reason
    content, named, ids, reason = "", [], set(), None
    async for chunk in made:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(named):
                ids.add(call.id)
                named.append([call.function.name, ""])
            named[-1][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    assert len(ids) == len(named)
    return content, [(name, read(arguments)) for name, arguments in named], reason


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_calls_are_read_out_of_the_answer(make_stack, words, stream):
    stack = await make_stack(tokenizer_settings=HERMES)
    both = [("look", {"at": "sky"}), ("wait", {})]
    assert await told(stack, TWO, words, stream=stream) == ("I look.", both, "tool_calls")
    alone = await told(stack, TWO, words, stream=stream, parallel_tool_calls=False)
    assert alone == ("I look.", both[:1], "tool_calls")
    nothing = "" if stream else None
    call = TEXT.removeprefix("I look.")
    assert await told(stack, call, words, stream=stream) == (nothing, both[:1], "tool_calls")
    assert await told(stack, "No <tool", words, stream=stream) == ("No <tool", [], "stop")
    assert await told(stack, TEXT, words, stream=stream, tool_choice="none") == (TEXT, [], "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        ("I look.\n<tool_", "I look.", []),
        ("I look.\n<tool_call>", "I look.", []),
        ('I look.\n<tool_call>\n{"name": "lo', "I look.", []),
        ('I look.\n<tool_call>\n{"name": "look", "arg', "I look.", []),
        ('I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "s', "I look.", [("look", '{"at": "s')]),
        (TEXT[:-8], "I look.", [("look", '{"at": "sky"}')]),
        (TWO[:-14], "I look.", [("look", '{"at": "sky"}'), ("wait", "{}")]),
    ],
)
async def test_a_call_that_max_tokens_cuts_is_told_as_far_as_it_goes(
    make_stack, words, stream, said, content, calls
):
    """As OpenAI does: no mark in the content, arguments that end where the answer does."""
    stack = await make_stack(tokenizer_settings=HERMES)
    length = len(words.encode_now(said))
    cut = await told(stack, said + "x", words, stream=stream, read=str, max_tokens=length)
    assert cut == (content, calls, "length")


async def test_a_format_may_be_named_and_without_one_text_stays_text(make_stack, words):
    stack = await make_stack(tokenizer_settings=PLAIN)
    assert await told(stack, TEXT, words, stream=False) == (TEXT, [], "stop")
    stack = await make_stack(tool_call_parser="nemotron_json", tokenizer_settings=PLAIN)
    said = '<TOOLCALL>[{"name": "wait", "arguments": {}}]</TOOLCALL>'
    assert await told(stack, said, words, stream=True) == ("", [("wait", {})], "tool_calls")
    stack = await make_stack(tool_call_parser="none", tokenizer_settings=HERMES)
    assert await told(stack, TEXT, words, stream=False) == (TEXT, [], "stop")


@pytest.fixture(scope="module")
def follows():
    tokenizer = LLTokenizer(byte_level_backend().to_str(), eos_token=[EOS])

    def check(lark, text):
        matcher = LLMatcher(tokenizer, lark)
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


async def test_a_call_that_must_be_made_is_enforced(make_stack, words, follows):
    """By a model whose template says nothing of calls as well."""
    stack = await make_stack(tokenizer_settings=PLAIN)
    one, two = TEXT.removeprefix("I look.\n").rstrip(), TWO.removeprefix("I look.\n")
    calls = [("look", {"at": "sky"}), ("wait", {})]

    async def grammar(**fields):
        assert await told(stack, two, words, stream=False, **fields) == (None, calls, "tool_calls")
        return stack.decode[0].submitted[-1].params.grammar

    required = await grammar(tool_choice="required")
    assert follows(required, one)
    assert follows(required, two)
    assert not follows(required, "text")
    assert not follows(required, one.replace("sky", "heavens"))
    calls.pop()
    once = await grammar(tool_choice="required", parallel_tool_calls=False)
    assert follows(once, one)
    assert not follows(once, two)
    named = await grammar(tool_choice={"type": "function", "function": {"name": "look"}})
    assert follows(named, one)
    assert not follows(named, two)
    assert not follows(named, two[len(one) + 1 :])


def allowing(mode, *tools):
    named = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


async def test_of_all_tools_some_may_be_allowed(make_stack, words, follows):
    """The model is told of those alone, as if there were no others."""
    template = "{{ tool_choice }} {{ tools | map(attribute='function') | map(attribute='name') | join(',') }}"
    stack = await make_stack(tokenizer_settings={"chat_template": template + "{# <tool_call> #}"})
    look, wait = TEXT.removeprefix("I look.\n").rstrip(), TWO.removeprefix(TEXT)

    def submitted():
        submit = stack.decode[0].submitted[-1]
        return stack.tokenizer.decode(list(submit.token_ids)), submit.params.grammar

    answer = await told(stack, TEXT, words, stream=False, tool_choice=allowing("auto", LOOK))
    assert answer == ("I look.", [("look", {"at": "sky"})], "tool_calls")
    assert submitted() == ("auto look", None)
    await told(stack, look, words, stream=True, tool_choice=allowing("required", LOOK))
    prompt, grammar = submitted()
    assert prompt == "required look"
    assert follows(grammar, look)
    assert not follows(grammar, wait)
    await told(stack, wait, words, stream=False, tool_choice=allowing("required", WAIT, LOOK))
    prompt, grammar = submitted()
    assert prompt == "required look,wait"
    assert follows(grammar, look)
    assert follows(grammar, wait)


async def test_an_answer_in_a_form_may_call_instead(make_stack, words, follows):
    stack = await make_stack(tokenizer_settings=HERMES)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    assert await told(stack, "5", words, stream=False, response_format=form) == ("5", [], "stop")
    grammar = stack.decode[0].submitted[-1].params.grammar
    assert follows(grammar, "5")
    assert follows(grammar, TEXT.removeprefix("I look.\n").rstrip())
    assert not follows(grammar, "text")
    await told(stack, "5", words, stream=False, response_format=form, tool_choice="none")
    assert not follows(stack.decode[0].submitted[-1].params.grammar, TEXT)


async def test_what_can_not_be_enforced_is_refused_before_it_is_sent(make_stack):
    stack = await make_stack(tokenizer_settings=PLAIN)
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "strin"}}}
    for fields, param, part in [
        ({"tools": [bad], "tool_choice": "required"}, "tools", "Invalid type: strin"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": 5}}]}, "tools", "got 5"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "can't both be followed",
        ),
        ({"tool_choice": "required", "tools": None}, "tool_choice", "needs tools"),
    ]:
        response = await stack.client.post("/v1/chat/completions", json=asking(**fields))
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert part in error["message"]
    assert not stack.decode[0].submitted


@pytest.mark.parametrize("name", SAID)
async def test_a_strict_tool_is_enforced_while_the_model_stays_free(follows, name):
    """The text around calls is any text, other tools take any arguments, and an answer need not call."""
    form, tokenizer, checker = FORMATS[name], Tokenizer(byte_level_backend()), GrammarChecker()
    wanted = {"tokenizer": tokenizer, "structure": None, "may_repeat": True, "grammars": checker}

    async def grammar(*strict):
        schemas = {tool.name: tool.parameters for tool in TOOLS}
        said = [{"name": n, "parameters": schemas[n], "strict": n in strict} for n in schemas]
        tools = [{"type": "function", "function": function} for function in said]
        use = await wanted_tool_use(tools, "auto", form, **wanted)
        return use.grammar

    text = SAID[name]
    wrong = text.replace("[1, 2]", '"1"')
    weather, clock, nothing = await grammar("weather"), await grammar("clock"), await grammar()
    await checker.close()
    assert nothing is None
    for lark in (weather, clock):
        assert follows(lark, "")
        assert follows(lark, "Just text, 1 < 2.\n")
        assert follows(lark, text)
        if form.begins:
            assert follows(lark, f"I look. {text} There: <")
            assert follows(lark, f"{text} Again: {text}")
    assert not follows(weather, wrong)
    assert follows(clock, wrong)


async def test_marks_that_are_special_tokens_are_written_and_shown_as_such(follows):
    backend = FastTokenizer.from_str(byte_level_backend().to_str())
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = Tokenizer(backend)
    wanted = {"structure": None, "may_repeat": False, "grammars": GrammarChecker()}
    use = await wanted_tool_use([WAIT], "required", FORMATS["hermes"], tokenizer=tokenizer, **wanted)
    await wanted["grammars"].close()
    assert use.has_special_marks
    matcher = LLMatcher(LLTokenizer(backend.to_str(), eos_token=[EOS]), use.grammar)
    tokens = tokenizer.encode_now('<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>')
    assert tokenizer.special_id("<tool_call>") == tokens[0]
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


async def test_a_strict_call_begins_at_a_special_token(follows):
    backend = FastTokenizer.from_str(byte_level_backend().to_str())
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = Tokenizer(backend)
    wanted = {"structure": None, "may_repeat": True, "grammars": GrammarChecker()}
    strict = {"type": "function", "function": {**LOOK["function"], "strict": True}}
    use = await wanted_tool_use([strict], "auto", FORMATS["hermes"], tokenizer=tokenizer, **wanted)
    await wanted["grammars"].close()
    for said, is_right in (("sky", True), ("heavens", False)):
        matcher = LLMatcher(LLTokenizer(backend.to_str(), eos_token=[EOS]), use.grammar)
        tokens = tokenizer.encode_now(TEXT.replace("sky", said))
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is is_right
