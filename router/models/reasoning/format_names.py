"""Formats of thinking, by their names for ``--reasoning-parser``. These names are vLLM's."""

from __future__ import annotations

from dataclasses import replace

from router.config import ReasoningParserName
from router.models.chat_template import ChatTemplate
from router.models.reasoning.reasoning_format import ReasoningFormat

THINK_TAGS = ReasoningFormat(
    begins=("<think>",),
    ends=("</think>",),
    interrupts=("<tool_call>\n<function=", "<|tool_calls_section_begin|>"),
)
"""Nemotron, Qwen, DeepSeek, Kimi, MiniMax, OLMo and many others."""
GLM = replace(THINK_TAGS, written="\n<think>")
"""GLM 4.5 and 4.6 begin their turns with a line break."""
GRANITE = ReasoningFormat(
    begins=("Here is my thought process:", "Here's my thought process:"),
    ends=("Here is my response:", "Here's my response:"),
)
"""Granite 3.2, which has sentences instead of tags."""
MISTRAL = ReasoningFormat(begins=("[THINK]",), ends=("[/THINK]",))
"""Magistral and Ministral 3."""
SEED = ReasoningFormat(
    begins=("<seed:think>",), ends=("</seed:think>",), opens=("<seed:think><seed:cot_budget_reflect>",)
)
"""Seed-OSS. With a budget of 0, its template opens a remark on the budget, too."""

FORMATS: dict[ReasoningParserName, ReasoningFormat] = {
    "deepseek_r1": THINK_TAGS,
    "deepseek_v3": THINK_TAGS,
    "glm45": GLM,
    "granite": GRANITE,
    "kimi_k2": THINK_TAGS,
    "minimax_m2": THINK_TAGS,
    "mistral": MISTRAL,
    "nemotron_v3": THINK_TAGS,
    "olmo3": THINK_TAGS,
    "qwen3": THINK_TAGS,
    "seed_oss": SEED,
}


def reasoning_format(name: ReasoningParserName, template: ChatTemplate | None) -> ReasoningFormat | None:
    """Return the format of this name; None for ``none``. For ``auto``, return the format whose marks are in
    the chat template; None if it has no such mark."""
    if name != "auto":
        return FORMATS.get(name)
    if template is None:
        return None
    for form in (THINK_TAGS, SEED, MISTRAL, GRANITE):
        if template.mentions(form.begin) or template.mentions(form.end):
            return GLM if form is THINK_TAGS and template.mentions("[gMASK]") else form
    return None
