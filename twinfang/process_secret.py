"""The secret of a router's processes (``--workers N``): with it they may ask one another for what the admin
API needs.

The supervisor makes a new one at each start, and hands it out by the environment. A command line could be
read by every user of the machine.
"""

from __future__ import annotations

import secrets

SECRET_VARIABLE = "TWINFANG_PROCESS_SECRET"


def process_secret() -> str:
    return secrets.token_hex(32)
