"""Facts of ``/v1/chat/completions``."""

from typing import Any

from testing.api_facts.fact import INVALID, Endpoint, Fact
from testing.api_facts.sampling import FORMAT, SAMPLING, SCHEMA

TOOL = {"type": "function", "function": {"name": "draw", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "wipe", "strict": True, "parameters": SCHEMA}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "draw", "arguments": '{"a": 1}'}}
NAMED = {"type": "function", "function": {"name": "draw"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
TOOLS = {"tools": [TOOL, OTHER]}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def called(content: Any) -> list[dict[str, Any]]:
    """Returns a chat with a call of a tool, and ``content`` as its result."""
    return [
        *user("draw"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": content},
    ]


OF_PROMPTS = (
    Fact("messages: system", [{"role": "system", "content": "Be brief."}, *user("hello")]),
    Fact("messages: developer", [{"role": "developer", "content": "Be brief."}, *user("hello")]),
    Fact("messages: text parts", user([text("hello"), text("again")])),
    Fact("messages: calls and results", called("done")),
    Fact("messages: results in parts", called([text("done")])),
    Fact(
        "messages: earlier thinking",
        [*user("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}, *user("d")],
    ),
    Fact("messages: image", user([{"type": "image_url", "image_url": {"url": "data:,"}}]), INVALID),
    Fact("messages: audio", user([{"type": "input_audio", "input_audio": {"data": ""}}]), INVALID),
    Fact("messages: file", user([{"type": "file", "file": {"file_id": "a"}}]), INVALID),
    Fact("messages: none", [], INVALID),
    Fact("tools", [TOOL]),
    Fact("tools: strict", [OTHER]),
    Fact("tools: custom", [{"type": "custom", "custom": {"name": "code"}}], INVALID),
    Fact("tool_choice: none", "none", beside=TOOLS),
    Fact("tool_choice: auto", "auto", beside=TOOLS),
    Fact("tool_choice: required", "required", beside=TOOLS),
    Fact("tool_choice: a function", NAMED, beside=TOOLS),
    Fact("tool_choice: allowed_tools", ALLOWED, beside=TOOLS),
    Fact("tool_choice: without tools", "required", INVALID),
    Fact(
        "tool_choice: required, with response_format",
        "required",
        INVALID,
        TOOLS | {"response_format": FORMAT},
    ),
    Fact("parallel_tool_calls", False, beside=TOOLS),
    Fact("chat_template_kwargs", {"enable_thinking": True}),
    Fact("chat_template_kwargs: messages", {"messages": []}, INVALID),
    Fact("add_generation_prompt", False),
    Fact("add_special_tokens", True),
    Fact("reasoning_effort", "low"),
    Fact("enable_thinking", False),
    Fact("thinking", {"type": "disabled"}),
    Fact("thinking: unknown type", {"type": "on"}, INVALID),
    Fact("thinking_token_budget", 4),
    Fact("thinking_token_budget: below -1", -2, INVALID),
    Fact("thinking_budget", -1),
    Fact("include_reasoning", False),
    Fact("separate_reasoning", False),
)
OF_ANSWERS = (
    Fact("logprobs", True),
    Fact("top_logprobs", 2, beside={"logprobs": True}),
    Fact("top_logprobs: without logprobs", 2, INVALID),
    Fact("max_tokens", 2),
    Fact("max_completion_tokens", 2, beside={"max_tokens": 2}),
    Fact("max_tokens: unlike max_completion_tokens", 3, INVALID, {"max_completion_tokens": 2}),
)
UNSUPPORTED = (
    Fact("audio", {"voice": "alloy", "format": "wav"}, INVALID),
    Fact("best_of", 2, INVALID),
    Fact("chat_template", "{{ messages }}", INVALID),
    Fact("continue_final_message", True, INVALID),
    Fact("documents", [{"text": "a"}], INVALID),
    Fact("echo", True, INVALID),
    Fact("function_call", {"name": "draw"}, INVALID),
    Fact("functions", [{"name": "draw"}], INVALID),
    Fact("modalities: text", ["text"]),
    Fact("modalities: audio", ["text", "audio"], INVALID),
    Fact("prediction", {"type": "content", "content": "a"}, INVALID),
    Fact("suffix", "a", INVALID),
    Fact("web_search_options", {}, INVALID),
)

CHAT = Endpoint(
    "/v1/chat/completions",
    "openai",
    {"messages": user("hello"), "max_tokens": 4},
    (*OF_PROMPTS, *OF_ANSWERS, *SAMPLING, *UNSUPPORTED),
)
