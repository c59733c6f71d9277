"""Which event loop the tests of this folder run on."""

import asyncio

import pytest
import uvloop


@pytest.hookimpl(tryfirst=True)
def pytest_asyncio_loop_factories(config, item):
    """TLS differs between asyncio's own loop and that of production."""
    return {"uvloop": uvloop.new_event_loop} if item.path.name == "test_https.py" else None
