"""The flags that say who may use a router, and for what."""

from __future__ import annotations

from twinfang.flags.flag import Flag
from twinfang.flags.values import existing_file, limit_store, one_of

API_KEYS_FILE = Flag(
    *("--api-keys-file", "FILE", existing_file),
    "file with the keys of clients that may send requests; `twinfang api-key` adds keys to it; read again "
    "whenever it changes",
    default_text="none: everybody may send requests",
)
LIMIT_STORE = Flag(
    *("--limit-store", "STORE", limit_store),
    "where the limits of API keys are counted: sqlite:FILE for the routers of one host, "
    "redis://[[user]:password@]host:port/db (rediss:// for TLS) for those of several; they are then limits "
    "of all these routers together",
    default_text="memory; with --workers, an SQLite file that ends with the router",
    is_secret=True,
)
CACHE_ISOLATION = Flag(
    *("--cache-isolation", "key|none", one_of("key", "none")),
    "who shares cached prompts: the requests of one API key, or all requests. Shared prompts save work, and "
    "let a key find out by the time to the first token what others have asked",
    default="key",
)
ADMIN_TOKEN_FILE = Flag(
    *("--admin-token-file", "FILE", existing_file),
    "file with the admin API's token, or with sha256: and the token's hexadecimal digest",
    default_text="none: there is no admin API",
)

ACCESS = (API_KEYS_FILE, CACHE_ISOLATION, LIMIT_STORE, ADMIN_TOKEN_FILE)
