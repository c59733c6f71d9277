import json

import pytest

from router.models.chat_template import ChatTemplate
from wire.errors import InvalidRequestError, ModelLoadError

MESSAGES = [
    {"role": "system", "content": 'Be <b>brief</b> & "exact".'},
    {"role": "user", "content": "Übergrößen 😀"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "5"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größer > kleiner"}}]

TEMPLATES = {
    "bundled": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "block lines": """\
{{- bos_token }}
    {%- set ns = namespace(last='', count=0) -%}
    {% for message in messages %}
        {% if message.role == 'tool' %}{% continue %}{% endif %}
        {% set ns.last = message.role %}
  {{ loop.index0 }} {{ message.content | trim }}
    {% endfor %}
{{ ns.last }}{{ unk_token }}
""",
    "tools": """\
{%- if tools is not none and tools | length > 0 -%}
<AVAILABLE_TOOLS>[{% for tool in tools %}{{ tool.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]
{{ tools | tojson(indent=2) }}{{ {'b': 1, 'a': 'é<'} | tojson(sort_keys=true) }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls %}<TOOLCALL>{{ call.function.arguments | tojson }}{% endfor -%}
{%- elif message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else -%}{{ message.content }}
{%- endif -%}
{%- endfor -%}
{{ documents is none }} {{ thinking is defined }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_in_transformers(name, tools):
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    variables = {"messages": MESSAGES, "tools": tools, "documents": None, "add_generation_prompt": True}
    ours = ChatTemplate({"default": TEMPLATES[name]}, special).render(variables)
    (theirs,), _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, **special
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "has no element 5"),
        ("{{ messages + 5 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_what_a_template_raises_is_an_error_of_the_request(source, part):
    with pytest.raises(InvalidRequestError, match=part) as caught:
        ChatTemplate({"default": source}, {}).render({"messages": MESSAGES})
    assert len(caught.value.message) < 600
    assert MESSAGES[0]["content"] == 'Be <b>brief</b> & "exact".'


def write_settings(folder, **settings):
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_the_file_of_its_own_comes_before_the_settings(tmp_path):
    write_settings(tmp_path, chat_template="settings", bos_token={"content": "<b>"}, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "x", "eos_token": "<e>"}))
    assert ChatTemplate.from_directory(tmp_path).render({}) == "settings"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file{{ eos_token }}")
    assert ChatTemplate.from_directory(tmp_path).render({}) == "<b>file<e>"


def test_a_checkpoint_may_have_a_template_for_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tool_choice }}"}]
    write_settings(tmp_path, chat_template=named)
    template = ChatTemplate.from_directory(tmp_path)
    assert template.render({"tools": None}) == "plain"
    assert template.render({"tools": TOOLS, "tool_choice": "auto"}) == "auto"
    assert template.reads("tool_choice", has_tools=True)
    assert not template.reads("tool_choice", has_tools=False)


@pytest.mark.parametrize(
    ("source", "is_said"), [("{{ messages }}", True), ("{% if tools %}x{% endif %}", False)]
)
def test_a_template_that_ignores_tools_is_named_when_it_is_loaded(tmp_path, caplog, source, is_said):
    write_settings(tmp_path, chat_template=source)
    with caplog.at_level("INFO"):
        ChatTemplate.from_directory(tmp_path)
    assert ("does not show a request's tools" in caplog.text) is is_said


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("{% if %}", "not valid Jinja, line 1"),
        (5, "neither text nor a list"),
        ([{"name": "rag", "template": "a"}], "with a template 'default'"),
        ([{"name": "default"}], "with a template 'default'"),
    ],
)
def test_a_template_that_can_not_work_is_refused_at_the_start(tmp_path, said, part):
    write_settings(tmp_path, chat_template=said)
    with pytest.raises(ModelLoadError, match=part):
        ChatTemplate.from_directory(tmp_path)


def test_a_folder_without_template_has_none(tmp_path):
    assert ChatTemplate.from_directory(tmp_path) is None
