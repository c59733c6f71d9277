"""Facts that completions and chats share."""

from __future__ import annotations

from typing import Any

from testing.api_facts.fact import INVALID, Fact

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
STREAM = {"stream": True}

SAMPLING = (
    Fact("model: null", None),
    Fact("model: unknown", "another", "404 model_not_found"),
    Fact("stream", True),
    Fact("stream_options: include_usage", {"include_usage": True}, beside=STREAM),
    Fact("stream_options: continuous_usage_stats", {"continuous_usage_stats": True}, beside=STREAM),
    Fact("stream_options: without stream", {"include_usage": True}, INVALID),
    Fact("n", 2),
    Fact("n: 0", 0, INVALID),
    Fact("stop: a string", "\n"),
    Fact("stop: strings", ["\n", "END"]),
    Fact("stop: empty", "", INVALID),
    Fact("seed", 7),
    Fact("temperature", 0.7),
    Fact("temperature: negative", -1, INVALID),
    Fact("top_p", 0.9),
    Fact("top_p: 0", 0, INVALID),
    Fact("presence_penalty", 0.5),
    Fact("frequency_penalty", 0.5),
    Fact("logit_bias", {"42": -100}),
    Fact("logit_bias: no token id", {"forty": 1}, INVALID),
    Fact("user", "user-1"),
    Fact("priority", -1),
    Fact("response_format: text", {"type": "text"}),
    Fact("response_format: json_object", {"type": "json_object"}),
    Fact("response_format: json_schema", FORMAT),
    Fact("response_format: unknown type", {"type": "xml"}, INVALID),
    Fact("structured_outputs", {"regex": "[a-c]+"}),
    Fact("guided_json", SCHEMA),
    Fact("guided_regex", "[a-c]+"),
    Fact("guided_regex: malformed", "a(", "400 invalid_grammar"),
    Fact("guided_choice", ["yes", "no"]),
    Fact("guided_grammar", 'start: "a" | "b"'),
    Fact("top_k", 20),
    Fact("top_k: -1", -1),
    Fact("min_p", 0.1),
    Fact("repetition_penalty", 1.1),
    Fact("min_tokens", 2),
    Fact("stop_token_ids", [5]),
    Fact("ignore_eos", True),
    Fact("include_stop_str_in_output", True, beside={"stop": ["\n"]}),
    Fact("skip_special_tokens", False),
    Fact("return_token_ids", True),
    Fact("cache_salt", "tenant-1"),
    Fact("session_id", "chat-17"),
    Fact("session_id: with spaces", "chat 17", INVALID),
    Fact("prompt_cache_key", "a"),
    Fact("prompt_cache_retention", "24h"),
    Fact("prompt_cache_retention: unknown", "7d", INVALID),
    Fact("speculate", False),
    Fact("use_beam_search", True, INVALID),
    Fact("length_penalty", 0.5, INVALID),
    Fact("truncate_prompt_tokens", 5, INVALID),
    Fact("allowed_token_ids", [5], INVALID),
    Fact("bad_words", ["a"], INVALID),
    Fact("prompt_logprobs", 1, INVALID),
    Fact("logprob_token_ids", [5], INVALID),
    Fact("prompt_embeds", "AA==", INVALID),
    Fact("unknown fields", "ignored"),
)
