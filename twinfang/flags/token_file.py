"""Files with a secret that a command shows to others."""

from __future__ import annotations

from pathlib import Path

from wire.errors import ConfigError


def read_token(setting: str, path: Path) -> str:
    """Return the token in the file. Raises :class:`ConfigError`, which names ``setting``."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{setting}` {path} can't be read: {error}") from error
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"`{setting}` {path} has no token: it should have one line, without spaces")
    return token
