"""The bundled model with a chat template as agents use it: with tools, and with thinking on request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from testing.repository import ROOT

MARKS = ("<think>", "</think>")
TEMPLATE = """\
{% if tools %}<|im_start|>system
Call these by <tool_call></tool_call>:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or () %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
"""It names the tools and leaves out their schemas, because the model's context is short."""


def write_agent_model(folder: Path) -> Path:
    """Writes the model into ``folder`` and returns it. Tokens for the two marks of thinking take the place of
    the last two of the vocabulary."""
    shutil.copytree(ROOT / "twinfang" / "bundled_model", folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    by_id = {token_id: text for text, token_id in model["vocab"].items()}
    for token_id, mark in zip(sorted(by_id)[-2:], MARKS, strict=True):
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != by_id[token_id]]
        del model["vocab"][by_id[token_id]]
        model["vocab"][mark] = token_id
        added.append(added[0] | {"content": mark, "id": token_id})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
