"""The same two calls in every format, and what a scanner finds in an answer."""

import json
from itertools import chain

from router.models.answer_parts import gathered
from router.models.tools.call_scanner import CallScanner
from router.models.tools.tool_format import Tool

WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"$ref": "#/$defs/days"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "array", "items": {"type": "integer"}}},
    },
)
CLOCK = Tool("clock", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)
CALLS = [("weather", {"city": "Zürich", "days": [1, 2]}), ("clock", {})]
SAID = {
    "hermes": """\
<tool_call>
{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
</tool_call>
<tool_call>
{"name": "clock", "arguments": {}}
</tool_call>""",
    "nemotron_json": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}, '
    '{"name": "clock", "arguments": {}}]</TOOLCALL>',
    "minimax": """\
<tool_calls>
{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
{"name": "clock", "arguments": {}}
</tool_calls>""",
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}, '
    '{"name": "clock", "arguments": {}}]',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Zürich", "days": [1, 2]}}; '
    '{"name": "clock", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}, '
    '"id": "9Vqj3hBzn"}, {"name": "clock", "arguments": {}}]',
    "deepseek_v3": """\
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "Zürich", "days": [1, 2]}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock
```json
{}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Zürich", "days": [1, 2]}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Zürich", "days": [1, 2]}<|tool_call_end|>'
    "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "qwen3_coder": """\
<tool_call>
<function=weather>
<parameter=city>
Zürich
</parameter>
<parameter=days>
[1, 2]
</parameter>
</function>
</tool_call>
<tool_call>
<function=clock>
</function>
</tool_call>""",
    "glm45": """\
<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Zürich</arg_value>
<arg_key>days</arg_key>
<arg_value>[1, 2]</arg_value>
</tool_call>
<tool_call>clock
</tool_call>""",
    "minimax_m2": """\
<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Zürich</parameter>
<parameter name="days">[1, 2]</parameter>
</invoke>
<invoke name="clock">
</invoke>
</minimax:tool_call>""",
    "pythonic": '[weather(city="Zürich", days=[1, 2]), clock()]',
}


def scan(form, pieces, *, tools=TOOLS, is_cut=False, **limits):
    """Return the content, and the calls by name and text of the arguments."""
    scanner = CallScanner(form, tools, **limits)
    last = scanner.cut if is_cut else scanner.finish
    whole = gathered([*chain.from_iterable(map(scanner.push, pieces)), *last()])
    assert len({call.id for call in whole.calls}) == len(whole.calls)
    return whole.content, [(call.name, call.arguments) for call in whole.calls]


def read(form, text, **options):
    """Return the content, and the calls by name and arguments."""
    content, calls = scan(form, [text], **options)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]
