"""Notices that a certificate's files have changed."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Callable

from wire.errors import ConfigError
from wire.tls.key_pair import KeyPair
from wire.tls.key_pair_files import KeyPairFiles

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0


class KeyPairWatch:
    """The certificate that is in use, and its replacement whenever the files change.

    ``use`` takes a new pair. It raises :class:`ConfigError` if the pair can't be used; then, and if the files
    can't be read, the pair before stays in use. The constructor calls ``use`` too, and lets the error out.
    """

    def __init__(self, files: KeyPairFiles, use: Callable[[KeyPair], None]) -> None:
        self._files = files
        self._use = use
        self._version = files.version()
        self.current = KeyPair.read(files)
        use(self.current)
        self._tell("certificate")
        self._is_broken = False
        self._has_told = False

    async def watch(self) -> None:
        """Look at the files once a second, until this task is cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Use the files' pair if they have changed.

        A pair that is broken is tried again in each look, because certificate and key may be written one
        after the other. Only a pair that is still broken one look later is logged, and only once.
        """
        version = self._files.version()
        is_same = version == self._version
        if is_same and not self._is_broken:
            return
        self._version = version
        try:
            # In another thread: checking a large RSA key takes as long as hundreds of tokens.
            pair = await asyncio.to_thread(KeyPair.read, self._files)
            self._use(pair)
        except ConfigError as error:
            if is_same and not self._has_told:
                self._has_told = True
                log.error("the certificate in use stays, until %s: %s", self._expiry(), error.message)
            self._has_told = self._has_told and is_same
            self._is_broken = True
            return
        self._is_broken = self._has_told = False
        self.current = pair
        self._tell("new certificate")

    def _tell(self, what: str) -> None:
        named = ", ".join(self.current.names) or "no host name"
        if self.current.expires_s <= time.time():
            log.error("%s for %s: it has expired on %s", what, named, self._expiry())
        else:
            log.info("%s for %s, valid until %s", what, named, self._expiry())

    def _expiry(self) -> str:
        expires = datetime.datetime.fromtimestamp(self.current.expires_s, datetime.UTC)
        return f"{expires:%Y-%m-%d %H:%M} UTC"
