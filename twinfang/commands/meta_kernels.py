"""Puts off the import of torch's meta kernels, which compute the shapes of tensors without data.

``import torch`` registers some thousand of them in Python, for compilers that trace programs. That is a fifth
of torch's import, and no server traces or compiles a program with torch. Sizes of weights are computed with
the meta kernels that torch has in C++; ``engine/cost/weight_size.py`` registers the others if it needs one.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

META_KERNELS = "torch._meta_registrations"


def put_off_meta_kernels() -> None:
    """Lets ``import torch`` leave out the meta kernels. They are registered when anything in their module is
    used. Without effect if torch is imported already."""
    if "torch" not in sys.modules and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds only the module of the meta kernels."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != META_KERNELS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    """Runs a module when it is first asked for anything. ``importlib.util.LazyLoader`` would run it during
    the import, which asks for its ``__spec__``."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _NotRunYet(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module as it is; the import system calls this."""

    def run(self, module: ModuleType, spec: importlib.machinery.ModuleSpec) -> None:
        module.__class__ = ModuleType
        module.__loader__ = spec.loader = self._loader
        self._loader.exec_module(module)


class _NotRunYet(ModuleType):
    def __getattr__(self, name: str) -> object:
        spec = self.__spec__
        if name.startswith("__") or spec is None or not isinstance(spec.loader, _Later):
            raise AttributeError(name)
        spec.loader.run(self, spec)
        return getattr(self, name)
