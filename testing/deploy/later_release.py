"""Runs Twinfang as the release after this one: ``python -m testing.deploy.later_release decode …``.

Every message sends all its fields, and one that this release does not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any, get_type_hints

from twinfang.__main__ import run
from wire import codec

codec.PROTOCOL_VERSION += 1


def _encoder(cls: type) -> Callable[[Any], list[Any]]:
    if cls not in codec._encoders:
        hints = get_type_hints(cls)
        parts = [(attrgetter(f.name), codec._packer_for(hints[f.name])) for f in dataclasses.fields(cls)]
        codec._encoders[cls] = lambda msg: [
            *(get(msg) if pack is None else pack(get(msg)) for get, pack in parts),
            {"a field": ["of the next release"]},
        ]
    return codec._encoders[cls]


codec._encoder = _encoder
codec._encoders.clear()

if __name__ == "__main__":
    run()
