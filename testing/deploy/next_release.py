"""Runs Twinfang as a release with another protocol: ``python -m testing.deploy.next_release decode …``."""

from twinfang.__main__ import run
from wire import codec

codec.PROTOCOL_VERSION += 1

if __name__ == "__main__":
    run()
