"""A capture leaves other threads free to call CUDA: NCCL's watchdog does while graphs are captured."""

from __future__ import annotations

import ast

from testing.repository import ROOT


def test_only_the_capturing_thread_is_held_to_the_rules_of_a_capture():
    """Read from the code: no CPU can capture. torch's default would end the capture with an error."""
    captures = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        for path in (ROOT / "engine").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.cuda.graph"
    ]
    assert captures
    assert all(arguments["capture_error_mode"] == "'thread_local'" for arguments in captures)
