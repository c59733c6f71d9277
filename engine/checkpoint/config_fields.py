"""Typed reading of JSON files. Errors name the file, the field, its value, and what is expected."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.errors import ModelLoadError

_TAGGED_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf")}
"""transformers 5 writes infinity as ``{"__float__": "Infinity"}``; older releases write the bare word."""

_REQUIRED: Any = object()


@dataclass(frozen=True)
class ConfigFields:
    """One JSON object. If a method takes several names of a field, the current name is first."""

    path: Path
    raw: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> ConfigFields:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelLoadError(f"{path} does not exist; expected a Hugging Face model directory") from None
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} can't be read as JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ModelLoadError(f"{path} holds a JSON {type(raw).__name__}; expected an object")
        return cls(path, raw)

    def error(self, name: str, found: object, expected: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {name} is {found!r}; expected {expected}")

    def integer(
        self, *names: str, default: int = _REQUIRED, minimum: int = 1, maximum: int | None = None
    ) -> int:
        name, value = self._lookup(names, default)
        expected = f"an integer of at least {minimum}" + ("" if maximum is None else f", at most {maximum}")
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, value, expected)
        if maximum is not None and value > maximum:
            raise self.error(name, value, expected)
        return value

    def number(self, *names: str, default: float = _REQUIRED, above: float = -math.inf) -> float:
        """Read a finite number greater than ``above``."""
        name, value = self._lookup(names, default)
        number = self._number(name, value)
        if not above < number < math.inf:
            raise self.error(name, value, "a number" if above == -math.inf else f"a number above {above:g}")
        return number

    def numbers(self, name: str, count: int, *, default: float = 1.0) -> tuple[float, ...]:
        """Read a list of ``count`` numbers. If the field is missing, each number is ``default``."""
        name, value = self._lookup((name,), [default] * count)
        if not isinstance(value, list) or len(value) != count:
            raise self.error(name, value, f"a list of {count} numbers")
        return tuple(self._number(name, item) for item in value)

    def boolean(self, *names: str, default: bool = _REQUIRED) -> bool:
        name, value = self._lookup(names, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, *names: str, choices: Sequence[str], default: str = _REQUIRED) -> str:
        name, value = self._lookup(names, default)
        if value not in choices:
            raise self.error(name, value, " or ".join(choices))
        return str(value)

    def listed(
        self, *names: str, choices: Collection[str], count: int, default: list[str] = _REQUIRED
    ) -> list[str]:
        """Read a list of ``count`` names, each one of ``choices``."""
        name, value = self._lookup(names, default)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(one in list(choices) for one in value)
        ):
            raise self.error(name, value, f"a list of {count}, each {' or '.join(choices)}")
        return value

    def indices(self, name: str, count: int) -> list[int]:
        """Read a list of layer numbers from 0 to ``count - 1``; empty if the field is missing."""
        _, value = self._lookup((name,), [])
        if not isinstance(value, list) or not all(index in range(count) for index in value):
            raise self.error(name, value, f"a list of layers from 0 to {count - 1}")
        return value

    def interval(self, *names: str, default: tuple[float, float]) -> tuple[float, float]:
        name, value = self._lookup(names, default)
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise self.error(name, value, "a pair [lower, upper]")
        lower, upper = (self._number(name, item) for item in value)
        if not lower <= upper:
            raise self.error(name, value, "a pair [lower, upper] in ascending order")
        return lower, upper

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Read one id or a list of ids; empty if the field is missing."""
        value = self.raw.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.error(name, value, "a token id, a list of token ids or null")
        return tuple(ids)

    def require(self, name: str, *supported: object, default: object) -> None:
        """Refuse a value that the model can't compute."""
        value = self.raw.get(name, default)
        if value not in supported:
            raise self.error(name, value, f"{' or '.join(map(repr, supported))} (others are not supported)")

    def spelling(self, *names: str) -> str:
        """Return the name that this file uses for a field, for error messages."""
        return next((name for name in names if self.raw.get(name) is not None), names[0])

    def _lookup(self, names: Sequence[str], default: Any) -> tuple[str, Any]:
        name = self.spelling(*names)
        if self.raw.get(name) is not None:
            return name, self.raw[name]
        if default is _REQUIRED:
            raise ModelLoadError(f"{self.path}: {' or '.join(names)} is missing; expected a value")
        return name, default

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, dict) and value.get("__float__") in _TAGGED_FLOATS:
            return _TAGGED_FLOATS[value["__float__"]]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, value, "a number")
        return float(value)
