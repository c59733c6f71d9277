"""Facts of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from typing import Any

from testing.api_facts.fact import Endpoint, Fact
from testing.api_facts.sampling import SCHEMA

REFUSED = "400 invalid_request_error"
QUESTION = [{"role": "user", "content": "hello"}]
EPHEMERAL = {"type": "ephemeral"}
TOOL = {"name": "draw", "description": "Draws it.", "input_schema": SCHEMA}
TOOLS = {"tools": [TOOL]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
CALL = {"type": "tool_use", "id": "call_1", "name": "draw", "input": {"a": 1}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}
REDACTED = {"type": "redacted_thinking", "data": "AA=="}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def turns(*contents: Any) -> list[dict[str, Any]]:
    """Returns messages of the user and the assistant in turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": said} for i, said in enumerate(contents)]


def result(**fields: Any) -> list[dict[str, Any]]:
    return turns("draw", [CALL], [{"type": "tool_result", "tool_use_id": "call_1", **fields}])


OF_PROMPTS = (
    Fact("messages: text", turns("hello")),
    Fact("messages: text blocks", turns([text("hello"), text("again")])),
    Fact("messages: several turns", turns("hello", "Yes?", [text("When?")])),
    Fact("messages: role system", [*QUESTION, {"role": "system", "content": "Be brief."}]),
    Fact("messages: tool_use and tool_result", result(content="drawn")),
    Fact("messages: tool_result in blocks", result(content=[text("drawn")])),
    Fact("messages: tool_result is_error", result(content="no paper", is_error=True)),
    Fact("messages: thinking", turns("a", [THOUGHT, REDACTED, text("b")], "c")),
    Fact("messages: image", turns([IMAGE, text("What is this?")]), REFUSED),
    Fact("messages: document", turns([DOCUMENT, text("What is this?")]), REFUSED),
    Fact("messages: image in tool_result", result(content=[IMAGE]), REFUSED),
    Fact("messages: begun answer", turns("hello", "The best"), REFUSED),
    Fact("messages: none", [], REFUSED),
    Fact("system", "Be brief."),
    Fact("system: blocks", [text("Be brief.", cache_control=EPHEMERAL)]),
    Fact("cache_control", {**EPHEMERAL, "ttl": "1h"}),
    Fact(
        "cache_control: 5 marks",
        EPHEMERAL,
        REFUSED,
        {"messages": turns([text("a", cache_control=EPHEMERAL)] * 4)},
    ),
    Fact("tools", [TOOL]),
    Fact("tools: strict", [TOOL | {"strict": True}]),
    Fact("tools: server tools", [SEARCH], REFUSED),
    Fact("tool_choice: auto", {"type": "auto"}, beside=TOOLS),
    Fact("tool_choice: none", {"type": "none"}, beside=TOOLS),
    Fact("tool_choice: without tools", {"type": "any"}, REFUSED),
    Fact("thinking: disabled", {"type": "disabled"}),
    Fact("thinking: adaptive", {"type": "adaptive"}),
    Fact("thinking: enabled", {"type": "enabled", "budget_tokens": 1024}),
    Fact("output_config: effort", {"effort": "low"}),
    Fact("chat_template_kwargs", {"enable_thinking": True}),
    Fact("priority", -1),
    Fact("model: null", None),
    Fact("model: unknown", "another", "404 not_found_error"),
    Fact("container", "c", REFUSED),
    Fact("context_management: edits", {"edits": [{"type": "clear_tool_uses_20250919"}]}, REFUSED),
    Fact("fallbacks", [{"model": "a"}], REFUSED),
    Fact("mcp_servers", [{"type": "url", "url": "https://a.invalid", "name": "a"}], REFUSED),
    Fact("thread", {"type": "create"}, REFUSED),
)
OF_ANSWERS = (
    Fact("max_tokens", 5),
    Fact("max_tokens: 0", 0, REFUSED),
    Fact("max_tokens: above the context", 20_000, REFUSED),
    Fact("stream", True),
    Fact("stop_sequences", ["\n", "e"]),
    Fact("stop_sequences: empty", [""], REFUSED),
    Fact("metadata", {"user_id": "u"}),
    Fact("service_tier", "auto"),
    Fact("temperature", 0.7),
    Fact("temperature: negative", -1, REFUSED),
    Fact("top_p", 0.9),
    Fact("top_k", 40),
    Fact("seed", 7),
    Fact("cache_salt", "tenant-1"),
    Fact("session_id", "chat-17"),
    Fact("tool_choice: any", {"type": "any"}, beside=TOOLS),
    Fact("tool_choice: tool", {"type": "tool", "name": "draw"}, beside=TOOLS),
    Fact(
        "tool_choice: disable_parallel_tool_use",
        {"type": "any", "disable_parallel_tool_use": True},
        beside=TOOLS,
    ),
    Fact("output_config: format", {"format": FORMAT}),
    Fact("output_format", FORMAT),
)

MESSAGES = Endpoint(
    "/v1/messages", "anthropic", {"messages": QUESTION, "max_tokens": 4}, (*OF_PROMPTS, *OF_ANSWERS)
)
COUNT = Endpoint("/v1/messages/count_tokens", "anthropic", {"messages": QUESTION}, OF_PROMPTS)
