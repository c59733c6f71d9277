"""Commands that any page shows can be given: the commands, flags, verbs and modules exist."""

import importlib.util
import re

import pytest

from testing.markdown import Page, pages
from testing.repository import ROOT
from twinfang.commands.table import COMMANDS

FLAGS = {one.name: {flag.name for group in one.groups for flag in group.flags} for one in COMMANDS}
OF_ALL = {"--help", "--version"}
OURS = re.compile(r"(?:^|[\s`/])twinfang ([a-z][a-z-]*)((?: [^|;&#`]*)?)")
MODULE = re.compile(r"python3? -m ((?:benchmarks|conformance|examples|testing|twinfang)(?:\.[a-z0-9_]+)*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
PAGES = [page for page in pages() if page.name != "CHANGELOG.md"]


def name_of(page):
    return str(page.relative_to(ROOT))


def unknown(command):
    """What a line of code gives to `twinfang` that it does not know."""
    for name, rest in OURS.findall(command):
        if name not in FLAGS:
            yield f"twinfang {name}"
            continue
        yield from (f"{name} {flag}" for flag in FLAG.findall(rest) if flag not in FLAGS[name] | OF_ALL)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_flags_exist(page):
    commands = Page(page).commands()
    assert not {one for command in commands for one in unknown(command)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_verbs_and_modules_exist(page):
    verbs = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    for command in Page(page).commands():
        assert set(re.findall(r"(?:^|&& )make ([a-z-]+)", command)) <= verbs, command
        for module in MODULE.findall(command):
            assert importlib.util.find_spec(module) is not None, command


def test_the_check_finds_what_is_wrong():
    assert list(unknown("twinfang up --decode 2 --no-such-flag")) == ["up --no-such-flag"]
    assert list(unknown(".venv/bin/twinfang fly")) == ["twinfang fly"]
