"""Formats of tool calls, by their names for ``--tool-call-parser``. These names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from router.config import ToolParserName
from router.models.chat_template import ChatTemplate
from router.models.tools.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from router.models.tools.formats.glm45 import Glm45
from router.models.tools.formats.granite import Granite
from router.models.tools.formats.hermes import Hermes
from router.models.tools.formats.kimi_k2 import KimiK2
from router.models.tools.formats.llama3_json import Llama3Json
from router.models.tools.formats.minimax import MiniMax
from router.models.tools.formats.minimax_m2 import MiniMaxM2
from router.models.tools.formats.mistral import Mistral
from router.models.tools.formats.nemotron_json import NemotronJson
from router.models.tools.formats.pythonic import Pythonic
from router.models.tools.formats.qwen3_coder import Qwen3Coder
from router.models.tools.tool_format import ToolFormat

FORMATS: dict[ToolParserName, ToolFormat] = {
    "hermes": Hermes(),
    "nemotron_json": NemotronJson(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": Llama3Json(),
    "pythonic": Pythonic(),
    "mistral": Mistral(),
    "granite": Granite(),
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KimiK2(),
    "glm45": Glm45(),
    "minimax": MiniMax(),
    "minimax_m2": MiniMaxM2(),
}
FORMATS |= {
    "qwen3_xml": FORMATS["qwen3_coder"],
    "glm47": FORMATS["glm45"],
    "llama4_pythonic": FORMATS["pythonic"],
}


@dataclass(frozen=True)
class _Sign:
    """What the chat template of a model says if the model writes a format."""

    name: ToolParserName
    mentioned: tuple[str, ...]
    missing: tuple[str, ...] = ()
    """Texts of other formats that have the same marks."""


_SIGNS = (
    _Sign("nemotron_json", ("<TOOLCALL>",)),
    _Sign("minimax_m2", ("<minimax:tool_call>", '<invoke name="', '<parameter name="')),
    _Sign("minimax", ("<tool_calls>", '{"name": <tool-name>, "arguments": <args-json-object>}')),
    _Sign("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    _Sign("deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json")),
    _Sign("deepseek_v31", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("granite", ("<|tool_call|>", "followed by a JSON list of tools")),
    _Sign("glm45", ("<tool_call>", "<arg_key>", "<arg_value>")),
    _Sign("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    _Sign("hermes", ("<tool_call>",), missing=("<tool_calls>", "]<]minimax[>[")),
    _Sign(
        "llama3_json", ('{"name": function name, "parameters": dictionary of argument name and its value}',)
    ),
    _Sign("pythonic", ("[func_name1(params_name1=params_value1",)),
)
"""The first one that fits counts."""


def tool_format(name: ToolParserName, template: ChatTemplate | None) -> ToolFormat | None:
    """Return the format of this name; None for ``none``. For ``auto``, return the format of the calls in the
    chat template; None if this format is not certain."""
    if name != "auto":
        return FORMATS.get(name)
    if template is None:
        return None
    for sign in _SIGNS:
        if all(map(template.mentions, sign.mentioned)) and not any(map(template.mentions, sign.missing)):
            return FORMATS[sign.name]
    return None
