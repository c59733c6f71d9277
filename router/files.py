"""The files that a router is told of, read before it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.access.key_file import KeyFile
from router.admin.admin_token import AdminToken
from router.admin.state_file import SavedChanges, StateFile
from router.config import RouterConfig
from router.model_folder import ModelFolder


@dataclass(frozen=True)
class Files:
    """What they hold. Whoever starts a router with others reads them as well, to fail before those start."""

    config: RouterConfig
    """With the changes that outlived the last start."""
    key_file: KeyFile | None
    model_folders: Mapping[str, ModelFolder]
    """By the names that models are served under."""
    admin_token: AdminToken | None
    state_file: StateFile | None
    saved: SavedChanges

    @classmethod
    def read(cls, config: RouterConfig) -> Files:
        """Raises :class:`ConfigError`, or :class:`ModelLoadError` for a tokenizer, a chat template or a
        generation config."""
        key_file = None if config.api_keys_file is None else KeyFile(config.api_keys_file)
        folders = {source.name: ModelFolder.read(source) for source in config.models}
        token = None if config.admin_token_file is None else AdminToken.from_file(config.admin_token_file)
        state_file = None if config.state_file is None else StateFile(config.state_file)
        saved = SavedChanges() if state_file is None else state_file.load()
        return cls(saved.applied_to(config), key_file, folders, token, state_file, saved)

    def close(self) -> None:
        if self.state_file is not None:
            self.state_file.close()
        for folder in self.model_folders.values():
            folder.tokenizer.close()
