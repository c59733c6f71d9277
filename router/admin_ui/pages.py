"""``GET /admin/ui``: the dashboard's files, served from memory with a strict Content-Security-Policy.

The files hold no data of this router: the page asks for the admin token and gets all data from the admin API.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from starlette.exceptions import HTTPException

PAGE = "index.html"

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}
"""Media types by a file's ending. The operating system's table is not used, as it may be wrong, and browsers
do not run scripts of a wrong type."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # innerHTML throws. So text, for example in a request's id or a model's name, can't become markup.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str


def _read(folder: Traversable, prefix: str = "") -> dict[str, Asset]:
    """Return all files below ``folder``. The keys are their paths within it."""
    assets: dict[str, Asset] = {}
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            assets |= _read(entry, f"{name}/")
        elif (media_type := MEDIA_TYPES.get(name.rpartition(".")[2])) is not None:
            content = entry.read_bytes()
            assets[name] = Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return assets


ASSETS = _read(files(__package__) / "static")

router = APIRouter(include_in_schema=False)


@router.get("/admin/ui")
async def page(request: Request) -> Response:
    return _answer(ASSETS[PAGE], request)


@router.get("/admin/ui/{name:path}")
async def asset(name: str, request: Request) -> Response:
    """Return a file. Its name is looked up among the files read at the start, and never becomes a path."""
    if not name:  # "/admin/ui/": the page's relative addresses would be wrong there
        return RedirectResponse("../ui")
    found = ASSETS.get(name)
    if found is None:
        raise HTTPException(404)
    return _answer(found, request)


def _answer(found: Asset, request: Request) -> Response:
    headers = HEADERS | {"ETag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
