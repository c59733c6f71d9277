"""One file per family of models. To add a family, add a file: every module here must define ``FAMILY``."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from engine.models.family import Family


def _families() -> dict[str, Family]:
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return {name: module.FAMILY for module in modules for name in module.FAMILY.architectures}


FAMILIES = _families()
"""Families by the name that a checkpoint's ``config.json`` has in ``architectures``."""
