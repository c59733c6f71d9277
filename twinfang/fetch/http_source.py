"""Files below a URL: of a hub, an object store, or any server of files.

A file's checksum is taken from what such servers say of it:

| server | says |
|---|---|
| any, with a file SHA256SUMS beside the others | SHA-256 of each file (coreutils' format) |
| a model hub, of large files | SHA-256 in X-Linked-Etag, on the redirect to its storage |
| a model hub, of small files | git's hash as the ETag |
| S3 and its likes | MD5 as the ETag of an object that was written in one piece, unless KMS encrypts it |
"""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import closing
from email.message import Message
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from twinfang.fetch.checksum import Checksum
from twinfang.fetch.source import Body, FetchError, FileState, InterruptedFetchError

SUMS = "SHA256SUMS"
MAX_SUMS_BYTES = 4 << 20
TIMEOUT_S = 60.0
"""A connection that brings nothing for so long is given up."""
PIECE_BYTES = 1 << 20
MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers after which the same request may succeed later."""
MAX_PAUSE_S = 60.0

Locate = Callable[[str], str]
"""Returns the URL of a file by its name."""


def below(url: str) -> Locate:
    """Return the function that finds files below ``url``. A query, for example a signature for the whole
    folder, becomes the query of each file."""
    base = urlsplit(url)

    def locate(name: str) -> str:
        return urlunsplit(base._replace(path=f"{base.path.rstrip('/')}/{quote(name)}", fragment=""))

    return locate


class HttpSource:
    """Implements :class:`twinfang.fetch.source.Source`.

    ``token`` is sent to the host of the URL alone, not to those that it redirects to.
    """

    def __init__(self, url: str, *, token: str = "", locate: Locate | None = None) -> None:
        base = urlsplit(url)
        self.name = urlunsplit(base._replace(query="", fragment="", netloc=base.netloc.rpartition("@")[2]))
        self._origin = base.scheme, base.netloc
        self._locate = locate or below(url)
        self._token = token
        self._opener = urllib.request.build_opener(_NoRedirects)
        if base.username is not None:
            raise FetchError(f"{self.name}: a password in a URL is shown in lists of processes: use a token")

    def listing(self) -> Mapping[str, Checksum | None] | None:
        body = self.open(SUMS)
        if body is None:
            return None
        text = b""
        with closing(body):
            while piece := body.read():
                text += piece
                if len(text) > MAX_SUMS_BYTES:
                    raise FetchError(f"{self.name}: {SUMS} has more than {MAX_SUMS_BYTES} bytes")
        return dict(_sum(line, self.name) for line in text.decode(errors="replace").splitlines() if line)

    def open(self, name: str, start: int = 0, validator: str = "") -> Body | None:
        headers = {"Accept-Encoding": "identity", "User-Agent": "twinfang"}
        if start:
            headers |= {"Range": f"bytes={start}-", "If-Range": validator}
        try:
            response, hub = self._get(name, self._locate(name), headers)
        except _NotThereError:
            return None
        except _NoSuchRangeError:
            return self.open(name)
        body = _HttpBody(f"{self.name}: {name}", response, hub)
        if body.start not in (0, start) or (body.start and body.state.validator != validator):
            body.close()
            return self.open(name)  # a server that does not heed If-Range
        return body

    def _get(
        self, name: str, url: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, Message]:
        """Return the answer, and the headers of the first answer on the way to it. Hubs describe a file in
        the first one, and redirect to a storage that knows nothing of models."""
        first: Message | None = None
        for _ in range(MAX_REDIRECTS + 1):
            request = urllib.request.Request(url, headers=dict(headers) | self._authorization(url))
            try:
                response = self._opener.open(request, timeout=TIMEOUT_S)
            except HTTPError as error:
                with error:
                    if error.code not in REDIRECTS or "Location" not in error.headers:
                        raise self._refusal(name, error) from error
                    first = first or error.headers
                    target = urljoin(url, error.headers["Location"])
                if urlsplit(target).scheme not in ("https", urlsplit(url).scheme):
                    raise FetchError(f"{self.name}: {name} is redirected from https to {target}") from None
                url = target
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(name, error) from error
            else:
                return response, first or response.headers
        raise FetchError(f"{self.name}: {name} is redirected more than {MAX_REDIRECTS} times")

    def _authorization(self, url: str) -> dict[str, str]:
        target = urlsplit(url)
        is_own = (target.scheme, target.netloc) == self._origin
        return {"Authorization": f"Bearer {self._token}"} if self._token and is_own else {}

    def _refusal(self, name: str, error: HTTPError) -> Exception:
        if error.code in (404, 410):
            return _NotThereError()
        if error.code == 416:
            return _NoSuchRangeError()
        said = f"{self.name}: {name} is answered {error.code} {error.reason}"
        if error.code in PASSING:
            pause = error.headers.get("Retry-After", "")
            return InterruptedFetchError(
                said, retry_after_s=min(float(pause) if pause.isdigit() else 0.0, MAX_PAUSE_S)
            )
        if error.code in (401, 403):
            said += ": give a token that may read it (`token_file`), or a URL that is signed"
        return FetchError(said)

    def _lost(self, name: str, error: Exception) -> FetchError:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return FetchError(
                f"{self.name}: its certificate is not trusted ({reason.verify_message}): name a file with "
                "that of its authority in SSL_CERT_FILE"
            )
        return InterruptedFetchError(f"{self.name}: {name}: {reason or type(error).__name__}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves redirects to the source, which gives its token to no other host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


class _NotThereError(Exception):
    pass


class _NoSuchRangeError(Exception):
    pass


class _HttpBody:
    def __init__(self, what: str, response: http.client.HTTPResponse, hub: Message) -> None:
        self._what, self._response = what, response
        headers = response.headers
        if headers.get("Content-Encoding", "identity") != "identity":
            raise FetchError(f"{what} comes as {headers['Content-Encoding']}, though nobody asked for that")
        self.start, size = 0, response.length
        if response.status == 206:
            self.start, size = _range_of(what, headers.get("Content-Range", ""))
        etag = headers.get("ETag", "")
        self.state = FileState(
            size,
            validator="" if etag.startswith("W/") else etag,
            checksum=None if size is None else _checksum(hub, headers),  # git's begins with the size
            revision=hub.get("X-Repo-Commit", ""),
        )

    def close(self) -> None:
        self._response.close()

    def read(self) -> bytes:
        try:
            return self._response.read(PIECE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise InterruptedFetchError(f"{self._what}: {error or type(error).__name__}") from error


def _range_of(what: str, text: str) -> tuple[int, int | None]:
    """Return the first byte and the whole size of ``bytes 5-9/10``."""
    span, _, total = text.removeprefix("bytes ").partition("/")
    first = span.partition("-")[0]
    if not first.isdigit():
        raise FetchError(f"{what}: the part that was asked for comes with Content-Range {text!r}")
    return int(first), int(total) if total.isdigit() else None


def _checksum(hub: Message, storage: Message) -> Checksum | None:
    if "X-Repo-Commit" in hub or "X-Linked-Etag" in hub:
        etag: str = hub.get("X-Linked-Etag", "") or hub.get("ETag", "")
        return Checksum.of_digits(etag.removeprefix("W/").strip('"'), "sha256", "git")
    encryption = storage.get("x-amz-server-side-encryption", "")
    is_content = not (encryption.startswith("aws:kms") or _KEY_OF_CLIENT in storage)
    if "x-amz-request-id" in storage and is_content:
        return Checksum.of_digits(storage.get("ETag", "").strip('"'), "md5")
    return None


_KEY_OF_CLIENT = "x-amz-server-side-encryption-customer-algorithm"


def _sum(line: str, source: str) -> tuple[str, Checksum]:
    digits, _, name = line.partition(" ")
    checksum = Checksum.of_digits(digits, "sha256")
    if checksum is None or not name:
        raise FetchError(f"{source}: a line of {SUMS} is {line[:100]!r}, not a SHA-256 and a file's name")
    return name.lstrip(" *").removeprefix("./"), checksum
