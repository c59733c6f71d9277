"""What several tests of the chart ask of its containers."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from testing.deploy.helm import Parse
from twinfang.cli import _parser
from twinfang.flags.flag import resolve


@pytest.fixture
def parse(bundled_model: Path, tmp_path: Path) -> Parse:
    """Reads a container's arguments as the process does, with files of this machine for those of a pod."""
    secret = tmp_path / "secret"
    secret.touch()

    def here(argument: str) -> str:
        flag, _, value = argument.partition("=")
        name, _, path = value.rpartition("=")
        if path.startswith("/models"):
            return f"{flag}={name}{'=' * bool(name)}{bundled_model}"
        if value.startswith("/etc/twinfang/"):
            return f"{flag}={secret}"
        return argument.replace("$(POD_IP)", "10.0.0.1")

    def parsed(arguments: list[str]) -> argparse.Namespace:
        given, unknown = _parser().parse_known_args([here(argument) for argument in arguments])
        assert unknown == []
        return resolve(given.command.groups, given, {})

    return parsed
