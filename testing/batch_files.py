"""Batch files for tests: requests to the bundled model, and a look at what came back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MODEL = "bundled_model"


def request(number: int, **body: Any) -> dict[str, Any]:
    """Returns a request; its number says which of the three APIs it calls."""
    limit = 4 + number % 13
    prompt = f"{number} + 4 ="
    url, fields = (
        ("/v1/completions", {"prompt": prompt, "max_tokens": limit, "temperature": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": limit}),
        ("/v1/responses", {"input": prompt, "max_output_tokens": limit}),
    )[number % 3]
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": url,
        "body": {"model": MODEL} | fields | body,
    }


def write_requests(path: Path, requests: Iterable[dict[str, Any]]) -> Path:
    """Writes one request a line."""
    path.write_text("".join(f"{json.dumps(one)}\n" for one in requests), encoding="utf-8")
    return path


def lines(*paths: Path) -> list[dict[str, Any]]:
    """Returns the lines of files that exist; all of them must be whole."""
    found = []
    for path in paths:
        if path.exists():
            found += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return found


def num_lines(path: Path) -> int:
    """Returns how many whole lines the file has so far."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_each_once(requests: Iterable[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    """Fails unless each request has exactly one answer, and the answer is one to its own body."""
    wanted = {one["custom_id"]: one for one in requests}
    counts = Counter(answer["custom_id"] for answer in answers)
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert counts.keys() == wanted.keys()
    for answer in answers:
        body = answer["response"]["body"]
        assert answer["response"]["status_code"] == 200, answer
        assert answer["error"] is None
        assert body["object"] in ("text_completion", "chat.completion", "response")
        limit = wanted[answer["custom_id"]]["body"]
        usage = body["usage"]
        num_tokens = usage.get("completion_tokens", usage.get("output_tokens"))
        assert 0 < num_tokens <= limit.get("max_tokens", limit.get("max_output_tokens", 0))
