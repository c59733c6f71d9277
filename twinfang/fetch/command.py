"""``twinfang fetch-model``: fetches a model's files into a directory."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from twinfang.fetch.folder_source import FolderSource
from twinfang.fetch.http_source import HttpSource
from twinfang.fetch.model_fetch import fetch_model
from twinfang.fetch.source import FetchError, Source
from twinfang.flags.token_file import read_token
from wire.errors import ConfigError


def prepare(values: argparse.Namespace) -> Callable[[], None]:
    """Prepares the command. Raises :class:`ConfigError` if source or directory is missing."""
    if values.source is None or values.directory is None:
        raise ConfigError("which model, and where to? Give both: twinfang fetch-model SOURCE DIR")
    token_file: Path | None = values.token_file
    directory: Path = values.directory
    if token_file is not None and not values.source.startswith("https:"):
        raise ConfigError(f"`token_file` is for sources of https://, not for {values.source}: leave it out")

    def run() -> None:
        fetch_model(
            _source(values.source, token_file),
            directory,
            with_weights=not values.without_weights,
            connections=values.connections,
            timeout_s=values.timeout,
        )

    return run


def _source(text: str, token_file: Path | None) -> Source:
    kind = urlsplit(text).scheme
    if kind == "file":
        return FolderSource(Path(unquote(urlsplit(text).path)))
    if kind == "s3":
        return _object_store(text)
    return HttpSource(text, token="" if token_file is None else read_token("token_file", token_file))


def _object_store(text: str) -> Source:
    try:
        from twinfang.fetch.s3_source import S3Source
    except ModuleNotFoundError as error:
        raise FetchError(
            f"{text}: the package {error.name}, which signs requests, is not installed: pip install "
            "'twinfang[s3]', or give the https:// URL of a store that needs no signature"
        ) from error
    is_other = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    return S3Source(text, path_style=is_other)
