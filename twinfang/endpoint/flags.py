"""The flags that name an OpenAI endpoint."""

from __future__ import annotations

from urllib.parse import urlsplit

from twinfang.flags.flag import Flag
from twinfang.flags.values import existing_file, http_url, positive

ROUTER_URL = "http://127.0.0.1:8000/v1"
_HELP = "an OpenAI endpoint, as OpenAI's clients take it: http://host:port/v1"


def base_url(text: str) -> str:
    """Returns the URL below which ``chat/completions`` is found. A URL without any path gets ``/v1``."""
    if any(sign in text for sign in "?#"):
        raise ValueError("expected a URL without ? and #, http://host:port/v1")
    url = urlsplit(http_url(text))
    if "@" in url.netloc:
        raise ValueError("a password in a URL is shown in lists of processes: use --api-key-file")
    try:
        _ = url.port
    except ValueError as error:
        raise ValueError(f"{str(error).lower()}; expected http://host:port/v1") from None
    path = url.path.rstrip("/") or "/v1"
    return f"{url.scheme}://{url.netloc}{path}"


BASE_URL = Flag("--base-url", "URL", base_url, _HELP, default=ROUTER_URL)
BASE_URL_OR_OWN = Flag(
    *("--base-url", "URL", base_url, _HELP),
    default_text="none: a stack is started, and stopped at the end",
)
API_KEY_FILE = Flag(
    *("--api-key-file", "FILE", existing_file),
    "file with the endpoint's API key",
    default_text="the key in TWINFANG_API_KEY, else in OPENAI_API_KEY, else none",
)
TIMEOUT = Flag(
    *("--timeout", "SECONDS", positive("seconds"), "longest time that a request may bring nothing"),
    default=900.0,
)
