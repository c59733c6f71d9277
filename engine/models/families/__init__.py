"""One file a family of models. A new one needs nothing else: each module here is asked for its ``FAMILY``."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from engine.models.family import Family


def _families() -> dict[str, Family]:
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {name: module.FAMILY for module in modules for name in module.FAMILY.architectures}


FAMILIES = _families()
"""By the name in ``architectures`` of a checkpoint's ``config.json``."""
