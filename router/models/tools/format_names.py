"""Formats of tool calls, by their names for ``--tool-call-parser``. These names are vLLM's."""

from __future__ import annotations

from router.config import ToolParserName
from router.models.chat_template import ChatTemplate
from router.models.tools.json_formats import Hermes, NemotronJson
from router.models.tools.qwen3_coder import Qwen3Coder
from router.models.tools.tool_format import ToolFormat

FORMATS: dict[ToolParserName, ToolFormat] = {
    "hermes": Hermes(),
    "nemotron_json": NemotronJson(),
    "qwen3_coder": Qwen3Coder(),
}


def tool_format(name: ToolParserName, template: ChatTemplate | None) -> ToolFormat | None:
    """Return the format of this name; None for ``none``. For ``auto``, return the format of the calls in the
    chat template; None if this format is not certain."""
    if name != "auto":
        return FORMATS.get(name)
    if template is None:
        return None
    if template.mentions("<TOOLCALL>"):
        return FORMATS["nemotron_json"]
    if template.mentions("<tool_call>"):
        has_tags = template.mentions("<function=") and template.mentions("<parameter=")
        return FORMATS["qwen3_coder" if has_tags else "hermes"]
    return None
