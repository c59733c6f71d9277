"""Fetches a model: the files that Twinfang reads of it, and no others."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from twinfang.fetch.checksum import Checksum
from twinfang.fetch.file_fetch import FetchedFile, LeftFileError, Pace, fetch_file
from twinfang.fetch.partial_model import PartialModel, locked, record_of
from twinfang.fetch.source import Body, FetchError, Source

log = logging.getLogger(__name__)

CONFIG = "config.json"
OTHERS = (
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Files that a model may lack. What needs one of them says so when it starts."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")


class ChangedSourceError(FetchError):
    """The source has another version of the model than that of the files that have already come."""


def fetch_model(
    source: Source, directory: Path, *, with_weights: bool, connections: int, timeout_s: float
) -> None:
    """Fetch a model into ``directory``, unless it is there. Several processes may do so at the same time: one
    fetches, and the others wait for it.

    Raises :class:`FetchError`, and :class:`DeadlineError` after ``timeout_s``. What has come until then is
    kept, and the next call continues.
    """
    if _is_there(source, directory, with_weights):
        return
    pace = Pace(timeout_s)
    with locked(directory, pace):
        if _is_there(source, directory, with_weights):
            return
        partial = PartialModel(directory)
        try:
            try:
                _Fetch(source, partial, pace, connections).run(with_weights)
            except ChangedSourceError as error:
                log.warning("%s: all of it is fetched again", error.message)
                partial.begin(source.name, "")
                _Fetch(source, partial, pace.renewed(), connections).run(with_weights)
        except OSError as error:
            raise FetchError(f"{error.filename or directory} can't be written: {error.strerror}") from error


def _is_there(source: Source, directory: Path, with_weights: bool) -> bool:
    """Return whether the model was fetched before. Asks the source nothing, so that a model that is there
    can be served while its source is away."""
    record = record_of(directory)
    if record is None:
        return False
    if record["source"] != source.name:
        raise FetchError(
            f"{directory} has the model of {record['source']}, not of {source.name}: give each version of a "
            "model a directory of its own"
        )
    if with_weights and not record["with_weights"]:
        raise FetchError(f"{directory} was fetched without weights: delete it, or give another directory")
    print(f"{directory} is there", flush=True)
    return True


class _Fetch:
    def __init__(self, source: Source, partial: PartialModel, pace: Pace, connections: int) -> None:
        self._source, self._partial, self._pace = source, partial, pace
        self._connections = connections
        self._revision = partial.take_up(source.name)
        self._lock = threading.Lock()
        """Guards the revision."""
        self._listing: Mapping[str, Checksum | None] | None = None

    def run(self, with_weights: bool) -> None:
        began_s = time.monotonic()
        self._listing = self._source.listing()
        files = [self._required(CONFIG, "it is no model that Twinfang could read")]
        files += [file for file in map(self._fetch, OTHERS) if file is not None]
        if with_weights:
            index = self._fetch(INDEX)
            files += [] if index is None else [index]
            files += self._fetch_all([SINGLE] if index is None else self._shards())
        self._partial.become_whole(
            {
                "source": self._source.name,
                "revision": self._revision,
                "with_weights": with_weights,
                "files": [asdict(file) for file in files],
            }
        )
        taken_s, num_bytes = time.monotonic() - began_s, sum(file.size for file in files)
        unchecked = [file.name for file in files if file.checked_by == "its size"]
        if unchecked:
            log.warning("the source has no checksum that could be compared of %s", ", ".join(unchecked))
        print(f"{len(files)} files, {num_bytes / 1e9:.3g} GB, in {taken_s:.1f} s", flush=True)

    def _required(self, name: str, otherwise: str) -> FetchedFile:
        file = self._fetch(name)
        if file is None:
            raise FetchError(f"{self._source.name} has no {name}: {otherwise}")
        return file

    def _fetch_all(self, names: Sequence[str]) -> list[FetchedFile]:
        def fetch(name: str) -> FetchedFile:
            try:
                return self._required(name, "its weights are incomplete, or not in the form of safetensors")
            except BaseException:
                self._pace.stop()
                raise

        with ThreadPoolExecutor(self._connections) as pool:
            running = [pool.submit(fetch, name) for name in names]
        errors = [error for one in running if (error := one.exception()) is not None]
        for error in errors:
            if not isinstance(error, LeftFileError):
                raise error
        return [one.result() for one in running]

    def _fetch(self, name: str) -> FetchedFile | None:
        done = self._partial.finished(name)
        if done is not None:
            return done
        if self._listing is not None and name not in self._listing:
            return None
        known = None if self._listing is None else self._listing[name]
        target = self._partial.files / name
        file = fetch_file(self._open, name, self._partial.parts, target, known, self._pace)
        if file is not None:
            self._partial.finish(file)
            log.info("%s is here: %.3g GB, checked by %s", name, file.size / 1e9, file.checked_by)
        return file

    def _open(self, name: str, start: int, validator: str) -> Body | None:
        body = self._source.open(name, start, validator)
        if body is not None and body.state.revision:
            with self._lock:
                if not self._revision:
                    self._revision = body.state.revision
                    self._partial.note(self._source.name, self._revision)
                elif self._revision != body.state.revision:
                    body.close()
                    raise ChangedSourceError(
                        f"{self._source.name} has changed from version {self._revision} to "
                        f"{body.state.revision}; name a version in the URL, and it can't"
                    )
        return body

    def _shards(self) -> list[str]:
        path = self._partial.files / INDEX
        try:
            shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FetchError(f"{self._source.name}: {INDEX} names no shards (weight_map)") from error
        for shard in shards:
            if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
                raise FetchError(f"{self._source.name}: {INDEX} names {shard!r}, which is no name of a shard")
        return shards
