"""Requests of one API key, or of one address, belong to one client."""

import pytest

from router.access.client import site_of
from router.config import ModelSource, RouterConfig
from testing.conditions import until
from testing.router.scripted_router import MODEL, raw_request
from testing.router.scripted_servers import hanging
from wire.errors import ConfigError

BODY = f'{{"model": "{MODEL}", "prompt": "hello", "stream": true}}'.encode()


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("junk1", "unknown"),
    ],
)
def test_an_address_of_ipv6_stands_for_its_network(host, site):
    assert site_of(host) == site


async def client_seen(stack, *forwarded: str) -> str:
    """The name of the client whose choice reaches the decode server."""
    before = len(stack.decode[0].submitted)
    head = "".join(f"X-Forwarded-For: {value}\r\n" for value in forwarded)
    _, writer = await raw_request(stack, BODY, head=head)
    await until(lambda: len(stack.decode[0].submitted) > before)
    writer.close()
    return stack.decode[0].submitted[-1].client


async def test_what_a_stranger_says_of_itself_does_not_count(make_stack):
    stack = await make_stack()
    stack.decode[0].script = hanging
    assert await client_seen(stack, "10.0.0.7") == "address 127.0.0.1"


async def test_what_a_trusted_proxy_says_counts(make_stack):
    stack = await make_stack(forwarded_allow_ips=("127.0.0.0/8",))
    stack.decode[0].script = hanging
    assert await client_seen(stack, "10.0.0.7") == "address 10.0.0.7"
    assert await client_seen(stack, "6.6.6.6, 10.0.0.8") == "address 10.0.0.8"
    assert await client_seen(stack) == "address 127.0.0.1"


@pytest.mark.parametrize("proxy", ["proxy.example", "10.0.0.5/8", "10.0.0", ""])
def test_a_proxy_that_is_no_address_is_refused(proxy):
    with pytest.raises(ConfigError, match="forwarded_allow_ips"):
        RouterConfig(
            models=(ModelSource("m", None),), decode_addresses=("h:1",), forwarded_allow_ips=(proxy,)
        )
