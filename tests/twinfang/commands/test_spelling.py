"""What the rooms below call a setting, and what a user of the command line reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from twinfang.commands.spelling import FLAGS, with_flags
from twinfang.commands.table import COMMANDS

ROOT = Path(__file__).parents[3]
ROOMS = ("engine", "kernels", "kv_transfer", "wire")
BELOW = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
ABOVE = [
    path
    for room in ("decode_server", "prefill_server", "router", "telemetry", "twinfang")
    for path in (ROOT / room).rglob("*.py")
]
NAMES = {flag.name for command in COMMANDS for group in command.groups for flag in group.flags}
OTHER_FLAGS = {"--help", "--version", "--lifeline", "--turn", "--pid", "--cacert", "--cert", "--key"}
"""Flags of every command, flags that only child processes get, and flags of docker and curl."""
GIB = 1 << 30


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ("`max_num_seqs` 9 x (1 + `num_speculative` 3)", "--max-num-seqs 9 x (1 + --speculative 3)"),
        ("`nodes.rank` must be below `nodes.size` 2", "--node-rank must be below --nnodes 2"),
        ("`nodes.store` a:1, `data_parallel.store` b:2", "--dist-init-addr a:1, --data-parallel-address b:2"),
        ("choose another `port`", "choose another --port"),
        ("`cache_memory_bytes` must be at least 1", "--cache-memory must be at least 1"),
        ("`cache_memory_bytes` 2147483648, `max_model_len` 8", "--cache-memory 2.00, --max-model-len 8"),
        ("a `name_of_nothing` 3 and `twinfang up`", "a `name_of_nothing` 3 and `twinfang up`"),
    ],
)
def test_settings_are_written_as_their_flags_and_other_names_stay(message, read):
    assert with_flags(message) == read


@given(num_bytes=st.integers(0, 1 << 50))
def test_bytes_are_told_in_gib_that_are_enough_and_hardly_more(num_bytes):
    flag, value = with_flags(f"`cache_memory_bytes` {num_bytes}").split()
    assert flag == "--cache-memory"
    assert num_bytes <= float(value) * GIB < num_bytes + 0.011 * GIB


def test_every_setting_of_an_engine_has_a_flag():
    settings = {field.name for field in fields(EngineConfig)} - {"nodes", "data_parallel", "file_cache"}
    assert settings <= FLAGS.keys()


def test_every_setting_that_a_message_names_has_a_flag():
    named = {name for path in BELOW for text in messages(path) for name in re.findall(r"`([a-z_.]+)`", text)}
    assert "max_num_seqs" in named
    assert named <= FLAGS.keys()


def test_the_rooms_below_name_no_flag():
    lines = [(path, line) for path in BELOW for line in path.read_text(encoding="utf-8").splitlines()]
    assert [found for found in lines if re.search(r"(?<![\w-])--[a-z]", found[1])] == []


def test_every_flag_that_a_message_names_exists():
    named = [(path, text) for path in ABOVE for text in messages(path)]
    assert [(path, flag) for path, text in named for flag in unknown_flags(text)] == []


def test_the_check_finds_flags_that_do_not_exist():
    assert list(unknown_flags("--max-choices, --max-choice or --data-parallel-")) == ["--max-choice"]


def unknown_flags(text: str) -> Iterator[str]:
    """Flags that no command has. The text of an f-string may end within a flag's name, as `--min-` does."""
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text):
        is_start = flag.endswith("-") and any(name.startswith(flag) for name in NAMES)
        if flag not in NAMES | OTHER_FLAGS and not is_start:
            yield flag


def messages(path: Path) -> Iterator[str]:
    """Strings of a module that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value
