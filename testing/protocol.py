"""Checks that the messages between processes are those of the last release, or more of them.

    python -m testing.protocol [--release VERSION --commit HASH]

A process of the last release reads today's messages by the positions and types of their fields. So no field
may go, move or change its type or default, and a new one stands last, made with ``since`` or ``ignorable``
(wire/codec.py). With ``--release``, writes down today's messages as those of a release.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wire.messages
from testing.repository import ROOT
from wire import codec, gathered

FILE = ROOT / "wire" / "last_release.json"
Schema = dict[str, list[list[str]]]


def messages() -> dict[str, type]:
    """Returns all messages that processes of two releases may exchange, by name. Ranks of one server and
    helpers of one process are of one release."""
    between = {gathered.__name__} | {
        f"wire.messages.{one.name}"
        for one in pkgutil.iter_modules(wire.messages.__path__)
        if one.name not in ("group", "ranks")
    }
    for name in between:
        importlib.import_module(name)
    return {name: cls for name, cls in sorted(codec._classes.items()) if cls.__module__ in between}


def schema() -> Schema:
    """Returns name, type and default value of each field of each message, in order."""
    return {
        name: [[field.name, str(field.type), _default(field)] for field in dataclasses.fields(cls)]
        for name, cls in messages().items()
    }


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "" if field.default is dataclasses.MISSING else repr(field.default)


def faults(released: Schema, today: Schema, marks: dict[str, set[str]]) -> Iterator[str]:
    """Yields what a process of the last release would misread. ``marks`` has the fields of each message that
    are made with ``since`` or ``ignorable``."""
    for name, fields in released.items():
        ours = today.get(name)
        if ours is None:
            yield f"{name} is gone: processes of the last release still send or expect it"
        elif ours[: len(fields)] != fields:
            first = next(i for i, field in enumerate(fields) if ours[i : i + 1] != [field])
            now = " ".join(ours[first]) if first < len(ours) else "nothing"
            yield f"{name}: field {first} was {' '.join(fields[first])}, now {now}: put new fields last"
        else:
            for field, *_ in ours[len(fields) :]:
                if field not in marks[name]:
                    yield f"{name}.{field} is new: make it with since() or ignorable() of wire/codec.py"


def marked() -> dict[str, set[str]]:
    return {
        name: {field.name for field in dataclasses.fields(cls) if "since" in field.metadata}
        for name, cls in messages().items()
    }


def last_release(path: Path = FILE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testing.protocol")
    parser.add_argument("--release", help="write down today's messages as those of this version")
    parser.add_argument("--commit", help="the version's commit")
    args = parser.parse_args()
    if args.release:
        release = {"release": args.release, "commit": args.commit, "protocol": codec.PROTOCOL_VERSION}
        text = json.dumps(release | {"messages": schema()}, indent=1)
        FILE.write_text(text + "\n", encoding="utf-8")
        return 0
    found = list(faults(last_release()["messages"], schema(), marked()))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
