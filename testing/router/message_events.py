"""Reads the streams of ``/v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json


def read_events(stream: str) -> list[dict[str, Any]]:
    """Returns the data of a stream's events. Checks that each event is named after its data's type."""
    events = []
    for lines in stream.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a client makes of a whole stream."""
    start, *blocks, last, stop = events
    assert (start["type"], last["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    usage = start["message"]["usage"] | last["usage"]
    return start["message"] | last["delta"] | {"content": put_together(blocks), "usage": usage}


def put_together(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the content blocks that a client makes of events. Checks that the events come in the right
    order."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    """The JSON text of each block's input."""
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            texts.append("")
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        block = blocks[-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use" and texts[-1]:
                block["input"] = from_json(texts[-1], allow_partial=True)
            continue
        delta = event["delta"]
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                block["signature"] = delta["signature"]
            case "input_json_delta":
                texts[-1] += delta["partial_json"]
    assert not is_open
    return blocks
