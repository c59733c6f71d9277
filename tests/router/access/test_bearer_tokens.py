"""Bearer tokens of an issuer: which are accepted, whose they are, and what happens if its keys change or
can't be read."""

import asyncio
import base64
import hashlib
import hmac
import json
import time

import pytest
from cryptography.hazmat.primitives import serialization

from router.access.key_limits import KeyLimits
from router.access.tokens import issuer_keys
from router.access.tokens.bearer_tokens import LEEWAY_S, MAX_TOKEN_BYTES, BearerTokens
from router.access.tokens.issuer_keys import IssuerKeys
from router.config import TokenIssuer
from testing.router.token_issuer import AUDIENCE, KEYS_PATH, SigningKey, encoded, running_issuer
from wire.errors import AuthenticationError, ConfigError, UnavailableError

RSA = SigningKey.rsa("rsa")


@pytest.fixture
def issuer():
    with running_issuer() as running:
        yield running


@pytest.fixture
async def tokens(issuer):
    keys = IssuerKeys.of(TokenIssuer(issuer.url, AUDIENCE))
    yield BearerTokens(TokenIssuer(issuer.url, AUDIENCE), keys)
    await keys.close()


async def refusal(tokens, token):
    with pytest.raises(AuthenticationError) as raised:
        await tokens.key_of(token)
    assert token not in raised.value.message
    return raised.value.message


async def test_claims_become_name_priority_limits_and_role(issuer, tokens):
    key = await tokens.key_of(issuer.token())
    assert (key.name, key.min_priority, key.limits, key.role) == ("tenant:alice", None, None, None)
    claims = {
        "sub": "auth0|bob",
        "twinfang_min_priority": 5,
        "twinfang_limits": {"requests_per_minute": 60, "tokens_total": 10},
        "twinfang_role": ["something-else", "view", "operate"],
    }
    key = await tokens.key_of(issuer.token(**claims))
    assert key.name == "tenant:auth0|bob"
    assert key.min_priority == 5
    assert key.limits == KeyLimits(60, tokens_total=10)
    assert key.role == "operate"


async def test_claims_have_the_names_that_flags_give(issuer):
    settings = TokenIssuer(
        issuer.url, AUDIENCE, tenant_claim="https://example.com/tenant", role_claim="realm_access.roles"
    )
    tokens = BearerTokens(settings, IssuerKeys.of(settings))
    claims = {"https://example.com/tenant": "acme", "realm_access": {"roles": ["configure"]}}
    key = await tokens.key_of(issuer.token(**claims))
    assert (key.name, key.role) == ("tenant:acme", "configure")


@pytest.mark.parametrize(
    ("claims", "part"),
    [
        ({"exp": 1_000_000_000}, "expired"),
        ({"exp": None}, "has no claim 'exp'"),
        ({"nbf": 9_000_000_000}, "not valid yet"),
        ({"iat": 9_000_000_000}, "not valid yet"),
        ({"aud": "another"}, "for another audience"),
        ({"aud": ["another", "one"]}, "for another audience"),
        ({"aud": None}, "has no claim 'aud'"),
        ({"iss": "https://evil.example.com"}, "of another issuer"),
        ({"iss": None}, "has no claim 'iss'"),
        ({"sub": None}, "'sub' must name the tenant"),
        ({"sub": "two words"}, "'sub' must name the tenant"),
        ({"sub": "line\nbreak"}, "'sub' must name the tenant"),
        ({"sub": "x" * 256}, "'sub' must name the tenant"),
        ({"twinfang_min_priority": "5"}, "'twinfang_min_priority' must be an integer"),
        ({"twinfang_min_priority": True}, "'twinfang_min_priority' must be an integer"),
        ({"twinfang_limits": {"tokens_per_week": 1}}, "'twinfang_limits' must be an object"),
        ({"twinfang_limits": {"tokens_total": 0}}, "tokens_total in the token's claim"),
        ({"twinfang_limits": 5}, "'twinfang_limits' must be an object"),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value)[:40],
)
async def test_a_token_that_is_not_for_now_and_here_is_refused(issuer, tokens, claims, part):
    assert part in await refusal(tokens, issuer.token(**claims))


async def test_forged_tokens_are_refused(issuer, tokens):
    """With a changed claim, another's key under a known name, no signature, or a public key as password."""
    issuer.keys = [issuer.keys[0], RSA]
    good = issuer.token()
    head, claims, signature = good.split(".")
    changed = encoded({"iss": issuer.url, "aud": AUDIENCE, "sub": "root", "exp": time.time() + 99})
    assert "signature" in await refusal(tokens, f"{head}.{changed}.{signature}")
    thief = SigningKey.elliptic("first")
    assert "signature" in await refusal(tokens, issuer.token(thief))
    for alg in ("none", "None", "", None, "HS512"):
        for end in ("", signature):
            unsigned = f"{encoded({'alg': alg, 'kid': 'rsa'})}.{claims}.{end}"
            assert "expected one of ES256" in await refusal(tokens, unsigned)
    pem = RSA.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    to_sign = f"{encoded({'alg': 'HS256', 'kid': 'rsa'})}.{claims}"
    mac = hmac.new(pem, to_sign.encode(), hashlib.sha256).digest()
    signed_by_password = base64.urlsafe_b64encode(mac).rstrip(b"=").decode()
    as_password = f"{to_sign}.{signed_by_password}"
    assert "'HS256'" in await refusal(tokens, as_password)
    crossed = issuer.token(issuer.keys[0], headers={"kid": "rsa"})
    assert "names the key 'rsa' for ES256" in await refusal(tokens, crossed)
    for garbage in ("..", "a.b.c", f"{head}.é.", "é.a.b"):
        assert "can't be read" in await refusal(tokens, garbage)
    assert (await tokens.key_of(good)).name == "tenant:alice"


async def test_keys_in_the_token_s_own_head_do_not_count(issuer, tokens):
    thief = SigningKey.elliptic("thief")
    head = {"kid": "thief", "jwk": thief.public, "jku": "http://evil.example.com/keys"}
    assert "has no such key" in await refusal(tokens, issuer.token(thief, headers=head))


async def test_an_oversized_token_is_not_looked_at(issuer, tokens):
    message = await refusal(tokens, issuer.token(blob="x" * MAX_TOKEN_BYTES))
    assert f"the limit is {MAX_TOKEN_BYTES}" in message
    assert issuer.num_asked == 0


async def test_a_token_is_remembered_until_it_expires(issuer):
    clock = [time.time()]
    settings = TokenIssuer(issuer.url, AUDIENCE)
    tokens = BearerTokens(settings, IssuerKeys.of(settings), now=lambda: clock[0])
    token = issuer.token()
    assert await tokens.key_of(token) is await tokens.key_of(token)
    clock[0] += 3600 + LEEWAY_S
    assert tokens._recall(hashlib.sha256(token.encode()).digest()) is None


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def watched(issuer, clock):
    source = issuer_keys.KeySetAddress("", issuer.url)
    return IssuerKeys(source, issuer.url, now=clock)


async def test_a_new_key_is_used_at_once_and_a_key_taken_back_is_not(issuer):
    clock = Clock()
    tokens = BearerTokens(TokenIssuer(issuer.url, AUDIENCE), watched(issuer, clock))
    old = issuer.token()
    await tokens.key_of(old)
    clock.now_s += issuer_keys.PAUSE_S
    issuer.keys = [issuer.keys[0], SigningKey.elliptic("second")]
    await tokens.key_of(issuer.token())
    assert issuer.num_asked == 2
    await tokens.key_of(old)
    issuer.keys = issuer.keys[1:]
    await tokens.keys._read()
    assert "'first'" in await refusal(tokens, old), "although it was remembered"


async def test_made_up_keys_do_not_become_requests_to_the_issuer(issuer):
    clock = Clock()
    tokens = BearerTokens(TokenIssuer(issuer.url, AUDIENCE), watched(issuer, clock))
    await tokens.key_of(issuer.token())
    clock.now_s += issuer_keys.PAUSE_S
    forged = [issuer.token(headers={"kid": f"made up {i}"}) for i in range(200)]
    await asyncio.gather(*(refusal(tokens, token) for token in forged))
    assert issuer.num_asked == 2, "all of them together cause one question"
    clock.now_s += issuer_keys.PAUSE_S - 1
    await asyncio.gather(*(refusal(tokens, token) for token in forged))
    assert issuer.num_asked == 2
    clock.now_s += 1
    await refusal(tokens, forged[0])
    assert issuer.num_asked == 3


async def test_known_keys_go_on_while_the_issuer_is_down(issuer, caplog):
    clock = Clock()
    tokens = BearerTokens(TokenIssuer(issuer.url, AUDIENCE), watched(issuer, clock))
    await tokens.key_of(issuer.token())
    for issuer.status, issuer.published in (
        (500, None),
        (200, b'{"keys": []}'),
        (200, b"<html>"),
        (302, None),
    ):
        clock.now_s += issuer_keys.PAUSE_S
        await tokens.keys._read()
        await tokens.key_of(issuer.token(sub=f"new {issuer.status}".replace(" ", "-")))
        assert "has no such key" in await refusal(tokens, issuer.token(headers={"kid": "x"}))
    assert "1 known ones stay in use" in caplog.text
    assert [s.value for m in tokens.keys.collect() for s in m.samples] == [4 * issuer_keys.PAUSE_S]


async def test_before_any_key_is_known_tokens_are_answered_503(issuer, tokens):
    issuer.status = 500
    with pytest.raises(UnavailableError, match="can't be read now"):
        await tokens.key_of(issuer.token())


async def test_an_endless_key_set_is_cut(issuer, tokens, caplog):
    issuer.published = b" " * (issuer_keys.MAX_BYTES + 1)
    with pytest.raises(UnavailableError):
        await tokens.key_of(issuer.token())
    assert f"more than {issuer_keys.MAX_BYTES} bytes" in caplog.text


async def test_keys_in_a_file_are_read_again_and_a_broken_file_changes_nothing(issuer, tmp_path):
    path = tmp_path / "keys.json"
    path.write_bytes(issuer.key_set)
    settings = TokenIssuer("https://login.example.com", AUDIENCE, keys=str(path))
    tokens = BearerTokens(settings, IssuerKeys.of(settings))
    issuer.url = settings.issuer
    await tokens.key_of(issuer.token())
    path.write_text("{")
    await tokens.keys._read()
    await tokens.key_of(issuer.token(sub="bob"))
    issuer.keys = [SigningKey.elliptic("second")]
    path.write_bytes(issuer.key_set)
    await tokens.keys._read()
    assert tokens.keys.known.names == ["second"]
    path.unlink()
    await tokens.keys._read()
    await tokens.key_of(issuer.token())
    assert issuer.num_asked == 0


def set_of(*keys):
    return json.dumps({"keys": keys})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"keys": 5}',
        set_of(),
        set_of({"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}),
        set_of(SigningKey.rsa("weak", 1024).public),
        set_of(RSA.public | {"use": "enc"}),
        set_of(RSA.public | {"alg": "HS256"}),
        set_of(RSA.public | {"key_ops": ["sign"]}),
        set_of(RSA.public | {"n": 5}),
        set_of(*[RSA.public] * 101),
    ],
)
def test_a_file_without_a_usable_key_is_refused_at_the_start(content, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        IssuerKeys.of(TokenIssuer("https://login.example.com", AUDIENCE, keys=str(path)))


@pytest.mark.parametrize(
    "address", ["http://login.example.com", "ftp://a/b", "http://10.0.0.1/keys", "https://"]
)
def test_keys_are_not_read_over_a_network_in_clear(address):
    with pytest.raises(ConfigError, match="https://"):
        IssuerKeys.of(TokenIssuer("https://login.example.com", AUDIENCE, keys=address))


async def test_an_address_of_keys_may_be_given(issuer):
    settings = TokenIssuer("https://login.example.com", AUDIENCE, keys=issuer.url + KEYS_PATH)
    tokens = BearerTokens(settings, IssuerKeys.of(settings))
    assert (await tokens.key_of(issuer.token(iss=settings.issuer))).name == "tenant:alice"


async def test_clocks_may_differ_a_little(issuer, tokens):
    now_s = int(time.time())
    await tokens.key_of(issuer.token(nbf=now_s + LEEWAY_S - 5, iat=now_s + LEEWAY_S - 5))
    assert "expired" in await refusal(tokens, issuer.token(exp=now_s - LEEWAY_S - 1))
