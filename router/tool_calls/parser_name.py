"""The values of ``--tool-call-parser``: vLLM's names of formats, and two more."""

from __future__ import annotations

from typing import Literal

ToolParserName = Literal["auto", "none", "hermes", "nemotron_json", "qwen3_coder"]
