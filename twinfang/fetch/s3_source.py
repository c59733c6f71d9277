"""Objects of S3, or of a store with its interface, by requests that are signed.

botocore finds the credentials, as every program for S3 does: in the environment, in files, or from the
cluster that gives a service account a role. It also signs; the signed URLs are fetched like any others.
AWS_ENDPOINT_URL names a store that is not Amazon's.
"""

from __future__ import annotations

from collections.abc import Mapping

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from twinfang.fetch.checksum import Checksum
from twinfang.fetch.http_source import SUMS, HttpSource
from twinfang.fetch.source import Body, FetchError

SIGNED_FOR_S = 3600
"""Each try of a file has a URL of its own; one that is read for longer is not cut off."""


class S3Source:
    """Implements :class:`twinfang.fetch.source.Source`. ``url`` is ``s3://BUCKET/PREFIX``.

    ``path_style``: the bucket is named in the path, as stores other than Amazon's have it, not in the host.
    """

    def __init__(self, url: str, *, path_style: bool) -> None:
        self.name = url.rstrip("/")
        self._bucket, _, prefix = self.name.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        style = {"addressing_style": "path" if path_style else "auto"}
        try:
            self._client = botocore.session.get_session().create_client(
                "s3", config=Config(signature_version="s3v4", s3=style)
            )
        except (BotoCoreError, ValueError) as error:
            raise FetchError(f"{self.name}: {error}") from error
        self._files = HttpSource(self.name, locate=self._signed)

    def listing(self) -> Mapping[str, Checksum | None]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix, Delimiter="/"
        )
        try:
            keys = [found["Key"] for page in pages for found in page.get("Contents", ())]
        except (BotoCoreError, ClientError) as error:
            raise FetchError(f"{self.name} can't be listed: {error}") from error
        sums = self._files.listing() if f"{self._prefix}{SUMS}" in keys else None
        names = (key.removeprefix(self._prefix) for key in keys)
        return {name: (sums or {}).get(name) for name in names}

    def open(self, name: str, start: int = 0, validator: str = "") -> Body | None:
        return self._files.open(name, start, validator)

    def _signed(self, name: str) -> str:
        key = {"Bucket": self._bucket, "Key": f"{self._prefix}{name}"}
        try:
            return str(self._client.generate_presigned_url("get_object", Params=key, ExpiresIn=SIGNED_FOR_S))
        except BotoCoreError as error:
            raise FetchError(f"{self.name}: {error}") from error
