"""Runs Twinfang as a later release that does not work with this one:
``python -m testing.deploy.next_release decode …``."""

from wire import codec

codec.PROTOCOL_VERSION = codec.FIRST_VERSION = codec.OLDEST_PEER = codec.PROTOCOL_VERSION + 1

from twinfang.__main__ import run  # noqa: E402  # messages read the versions when they are defined

if __name__ == "__main__":
    run()
