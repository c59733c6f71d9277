"""What the router reads of a model's folder."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from router.chat_template import ChatTemplate
from router.config import ModelSource
from router.sampling_defaults import SamplingDefaults
from router.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFolder:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: SamplingDefaults

    @classmethod
    def read(cls, source: ModelSource) -> ModelFolder:
        """Raises :class:`ModelLoadError` if tokenizer or chat template can't be used."""
        defaults = SamplingDefaults.from_directory(source.directory)
        if defaults != SamplingDefaults():
            log.info("sampling defaults of checkpoint %s: %s", source.name, defaults)
        return cls(
            Tokenizer.from_directory(source.directory),
            ChatTemplate.from_directory(source.directory),
            defaults,
        )
