"""Formats read back the calls that the templates of published models write for earlier turns."""

from pathlib import Path

import pytest

from router.models.chat_template import ChatTemplate
from router.models.tools.format_names import FORMATS, tool_format
from testing.router.tool_calls import TOOLS, read

FOLDER = Path(__file__).parent / "chat_templates"
FORMAT_OF = {
    "deepseek_r1_distill_qwen": "deepseek_v3",
    "deepseek_v3.1": "deepseek_v31",
    "glm_4.6": "glm45",
    "glm_4.7_flash": "glm45",
    "granite_3.3": "granite",
    "granite_4.0": "hermes",
    "minimax_m1": "minimax",
    "mistral_nemo": "mistral",
    "mistral_small_3.2": "mistral",
    "qwen3_coder": "qwen3_coder",
    "qwen_2.5": "hermes",
}
WRITES_NO_CALLS = "granite_3.3"
QUESTION = "How is the sky?"
CALLS = [("weather", {"city": 'Zürich "x" </p>\n', "days": [1, 2]}), ("clock", {})]


def template_of(name):
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})


def test_every_template_is_tested():
    assert {path.stem for path in FOLDER.glob("*.jinja")} == FORMAT_OF.keys()


@pytest.mark.parametrize("name", FORMAT_OF)
def test_the_format_is_recognised(name):
    assert tool_format("auto", template_of(name)) is FORMATS[FORMAT_OF[name]]


@pytest.mark.parametrize("name", sorted(FORMAT_OF.keys() - {WRITES_NO_CALLS}))
def test_what_the_template_writes_is_read_back(name):
    functions = [{"name": tool.name, "description": "", "parameters": tool.parameters} for tool in TOOLS]
    calls = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": called, "arguments": arguments}}
        for i, (called, arguments) in enumerate(CALLS)
    ]
    text = template_of(name).render(
        {
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": "", "tool_calls": calls},
            ],
            "tools": [{"type": "function", "function": function} for function in functions],
            "add_generation_prompt": False,
        }
    )
    _, found = read(FORMATS[FORMAT_OF[name]], text.rpartition(QUESTION)[2])
    assert found == CALLS
