"""The package ``ai`` of npm with four of its providers, against a real stack: ``streamText`` gets what
``generateText`` gets.

npm installs the packages of ``package.json`` into a temporary folder; ``ai_sdk.mjs`` asks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAM = "ai_sdk.mjs"
OLDEST_NODE = 18
UNREACHABLE = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH")
PROVIDERS = {"openai-compatible", "openai chats", "openai responses", "anthropic"}
ASKED = {(provider, question) for provider in PROVIDERS for question in ("text", "object", "tool")}
TRIP = {"city": ("Paris", "Rome"), "days": (1, 2, 3)}

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def node() -> str:
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(
                f"there is no {program} on this machine; the package `ai` needs Node {OLDEST_NODE} or newer"
            )
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < OLDEST_NODE:
        pytest.skip(f"Node {version} is too old: the package `ai` needs {OLDEST_NODE} or newer")
    return "node"


@pytest.fixture(scope="module")
def program(node, tmp_path_factory) -> Path:
    """The program, in a folder that has its packages."""
    folder = tmp_path_factory.mktemp("ai_sdk")
    for name in (PROGRAM, "package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder)
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    made = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    if made.returncode != 0 and (reason := UNREACHABLE.search(made.stderr)):
        pytest.skip(f"npm does not reach its registry ({reason[0]}), so the package `ai` is not here")
    assert made.returncode == 0, made.stderr
    return folder / PROGRAM


@pytest.fixture
def stack(stacks):
    return stacks("up", "--max-num-seqs", "16")


@pytest.fixture
def answers(node, program, stack):
    """What each provider got to each question."""
    environment = os.environ | {"AI_SDK_LOG_WARNINGS": "false"}
    run = subprocess.run(
        [node, str(program), stack.url, stack.model],
        cwd=program.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = map(json.loads, run.stdout.splitlines())
    return {(line.pop("provider"), line.pop("question")): line for line in lines}


def is_trip(made) -> bool:
    return made.keys() == TRIP.keys() and all(made[name] in allowed for name, allowed in TRIP.items())


def test_each_provider_accumulates_what_it_gets_whole(answers, stack):
    assert answers.keys() == ASKED | {("openai-compatible completions", "text")}
    for asked, answer in answers.items():
        whole, streamed, pieces = answer["whole"], answer["streamed"], answer["pieces"]
        assert pieces.endswith(streamed["text"]), asked  # the text is that of the last step
        if asked == (
            "anthropic",
            "object",
        ):  # a call of a tool, whose arguments the library writes anew if whole
            whole["text"], streamed["text"] = json.loads(whole["text"]), json.loads(streamed["text"])
        assert streamed == whole, asked
        assert all(count > 0 for count in whole["usage"]), asked
    stack.wait_until(stack.is_idle, "nothing is left behind")


def test_each_provider_gets_what_it_asked_for(answers):
    for asked in ASKED:
        whole = answers[asked]["whole"]
        if asked[1] == "object":
            assert is_trip(whole["object"]), asked
            assert whole["finishReason"] == "stop", asked
        elif asked[1] == "tool":
            assert whole["calls"], asked
            assert all(map(is_trip, whole["calls"])), asked
            booked = [f"{call['days']} days in {call['city']} are booked" for call in whole["calls"]]
            assert whole["results"] == booked, asked
        else:
            assert whole["text"], asked
    assert len({answers[provider, "text"]["whole"]["text"] for provider in PROVIDERS}) == 1
