"""Facts of ``/v1/responses``."""

from typing import Any

from testing.api_facts.fact import INVALID, Endpoint, Fact
from testing.api_facts.sampling import SAMPLING, SCHEMA

TOOL = {"type": "function", "name": "draw", "description": "Draws it.", "parameters": SCHEMA, "strict": True}
OTHER = {"type": "function", "name": "wipe", "parameters": SCHEMA}
TOOLS = {"tools": [TOOL, OTHER]}
CALL = {"type": "function_call", "call_id": "call_1", "name": "draw", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "drawn"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
MCP = {"type": "mcp", "server_label": "a", "server_url": "https://a.invalid"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "draw"}]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}
NOT_HERE = {"n", "response_format", "return_token_ids", "stream_options"}
"""Fields of sampling that are otherwise here: there is one answer, and its end has its usage."""


def said(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


OF_PROMPTS = (
    Fact("input", "hello"),
    Fact("input: items", [said("be brief", "developer"), said("hello")]),
    Fact("input: calls and outputs", [said("draw"), CALL, OUTPUT]),
    Fact("input: reasoning", [THOUGHT, said("a")]),
    Fact("input: image", [said([IMAGE])], INVALID),
    Fact("input: audio", [said([AUDIO])], INVALID),
    Fact("input: item_reference", [{"type": "item_reference", "id": "msg_1"}], INVALID),
    Fact("input: none", [], INVALID),
    Fact("instructions", "be brief"),
    Fact("previous_response_id: unknown", "resp_nobody", "400 previous_response_not_found"),
    Fact("tools", [TOOL]),
    Fact("tools: web_search", [{"type": "web_search"}], INVALID),
    Fact("tools: mcp", [MCP], INVALID),
    Fact("tool_choice: none", "none", beside=TOOLS),
    Fact("tool_choice: auto", "auto", beside=TOOLS),
    Fact("tool_choice: required", "required", beside=TOOLS),
    Fact("tool_choice: a function", {"type": "function", "name": "draw"}, beside=TOOLS),
    Fact("tool_choice: allowed_tools", ALLOWED, beside=TOOLS),
    Fact("parallel_tool_calls", False, beside=TOOLS),
    Fact("chat_template_kwargs", {"enable_thinking": True}),
    Fact("truncation: disabled", "disabled"),
    Fact("truncation: auto", "auto", INVALID),
)
OF_ANSWERS = (
    Fact("max_output_tokens", 3),
    Fact("max_output_tokens: 0", 0, INVALID),
    Fact("text: text", {"format": {"type": "text"}}),
    Fact("text: json_object", {"format": {"type": "json_object"}}),
    Fact("text: json_schema", {"format": FORMAT}),
    Fact("text: verbosity", {"verbosity": "low"}, INVALID),
    Fact("reasoning: effort", {"effort": "low"}),
    Fact("reasoning: summary", {"summary": "detailed"}, INVALID),
    Fact("include: logprobs, of a model that may think", ["message.output_text.logprobs"], INVALID),
    Fact("include: encrypted thinking", ["reasoning.encrypted_content"]),
    Fact("include: unknown", ["a"], INVALID),
    Fact("top_logprobs: above 20", 21, INVALID),
)
OF_THE_REQUEST = (
    Fact("store", False),
    Fact("metadata", {"a": "b"}),
    Fact("metadata: more than 16", {str(i): "" for i in range(17)}, INVALID),
    Fact("safety_identifier", "a"),
    Fact("service_tier", "auto"),
    Fact("max_tool_calls", 3),
    Fact("stream_options", {"include_obfuscation": False}, beside={"stream": True}),
)
UNSUPPORTED = (
    Fact("n", 2, INVALID),
    Fact("return_token_ids", True, INVALID),
    Fact("access_programs", ["a"], INVALID),
    Fact("background", True, INVALID),
    Fact("context_management", [{"type": "compaction"}], INVALID),
    Fact("conversation", "conv_1", INVALID),
    Fact("image", {"size": "auto"}, INVALID),
    Fact("moderation", {"model": "a"}, INVALID),
    Fact("prompt", {"id": "pmpt_1"}, INVALID),
    Fact("messages", [said("a")], INVALID),
    Fact("max_tokens", 3, INVALID),
    Fact("reasoning_effort", "low", INVALID),
    Fact("response_format", {"type": "text"}, INVALID),
)

RESPONSES = Endpoint(
    "/v1/responses",
    "openai",
    {"input": "hello", "max_output_tokens": 4},
    (
        *OF_PROMPTS,
        *OF_ANSWERS,
        *OF_THE_REQUEST,
        *(fact for fact in SAMPLING if fact.field not in NOT_HERE),
        *UNSUPPORTED,
    ),
)
