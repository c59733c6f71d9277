"""The flags that say who may use a router, and for what."""

from __future__ import annotations

from twinfang.flags.audit_link import audit_link
from twinfang.flags.flag import Flag
from twinfang.flags.values import existing_file, file_path, limit_store, one_of, only, some_text, yes_or_no

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
JWT_ISSUER = Flag(
    *("--jwt-issuer", "URL", some_text),
    "accept bearer tokens (JWT) of this OpenID Connect issuer beside API keys; exactly as tokens name it",
    default_text="none",
)
JWT_AUDIENCE = Flag(
    *("--jwt-audience", "NAME", some_text, "the audience that tokens for this router name"),
    default_text="none; needed with --jwt-issuer",
)
JWT_KEYS = Flag(
    *("--jwt-keys", "FILE|URL", some_text),
    "the issuer's public keys (JWKS); a file is read again whenever it changes, an address every five "
    "minutes and when a token names a new key",
    default_text="the address in the issuer's OpenID configuration",
)
JWT_TENANT_CLAIM = Flag(
    *("--jwt-tenant-claim", "CLAIM", some_text),
    "the claim that says whose a request is, for limits, fair shares and cached prompts; dots lead into "
    "objects, here and in the other claims",
    default="sub",
)
JWT_PRIORITY_CLAIM = Flag(
    *("--jwt-priority-claim", "CLAIM", some_text, "the claim with the least priority, as in a key's line"),
    default="twinfang_min_priority",
)
JWT_LIMITS_CLAIM = Flag(
    *("--jwt-limits-claim", "CLAIM", some_text),
    "the claim with limits, an object whose names are those of a key's line",
    default="twinfang_limits",
)
JWT_ROLE_CLAIM = Flag(
    *("--jwt-role-claim", "CLAIM", some_text),
    "the claim with roles for the admin API: view, operate or configure, or a list with one of them",
    default="twinfang_role",
)
METRICS_NEED_ROLE = Flag(
    *("--metrics-need-role", "", yes_or_no),
    "answer /metrics only to who has the role view; otherwise everybody may read them, without the figures "
    "of keys",
    default=False,
    default_text="off",
    is_switch=True,
)
AUDIT_LOG = Flag(
    *("--audit-log", "FILE", file_path),
    "file to which acts of operators, refused requests and changed keys are appended, one JSON line each; "
    "`twinfang audit verify FILE` finds out whether a line was changed",
    default_text="none",
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

AUDIT_ACTION = Flag(*("--action", "verify", only("verify"), "what to do with the files"), default="verify")
AUDIT_FILES = Flag(
    *("--file", "FILE", existing_file, "an audit log; repeat for files that were moved away, oldest first"),
    repeatable=True,
)
EXPECTED_LINE = Flag(
    *("--expect", "NUMBER:HASH", audit_link),
    "a line that must be there, as the router's log or an earlier check has named it; only so can it be told "
    "that the last lines were removed",
    default_text="none",
)

JWT = (
    *(JWT_ISSUER, JWT_AUDIENCE, JWT_KEYS),
    *(JWT_TENANT_CLAIM, JWT_PRIORITY_CLAIM, JWT_LIMITS_CLAIM, JWT_ROLE_CLAIM),
)
ACCESS = (API_KEYS_FILE, *JWT, CACHE_ISOLATION, LIMIT_STORE, ADMIN_TOKEN_FILE, METRICS_NEED_ROLE, AUDIT_LOG)
