"""Who this process is to Twinfang's other processes, and whom it believes."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from wire.errors import ConfigError
from wire.tls.contexts import client_context, mutual_context
from wire.tls.identity_files import IdentityFiles
from wire.tls.key_pair import KeyPair
from wire.tls.key_pair_watch import KeyPairWatch
from wire.tls.peer_names import PeerRole


class Identity:
    """The process's certificate and the authorities that it trusts, read again whenever the files change."""

    def __init__(self, files: IdentityFiles, role: PeerRole) -> None:
        """Raises :class:`ConfigError` if a file can't be used, or if the certificate is not one for
        ``role``."""
        self.names = files.names
        self._role: PeerRole = role
        self._listeners: list[Callable[[KeyPair], None]] = []
        self._watch = KeyPairWatch(files.key_pair(), self._use)

    @property
    def current(self) -> KeyPair:
        return self._watch.current

    def on_change(self, use: Callable[[KeyPair], None]) -> None:
        """Call ``use`` for the current pair, and for every later one on the thread of :meth:`watch`."""
        use(self.current)
        self._listeners.append(use)

    def forget(self, use: Callable[[KeyPair], None]) -> None:
        """Undo :meth:`on_change`."""
        self._listeners.remove(use)

    async def watch(self) -> None:
        """Use the files' content whenever it changes, until this task is cancelled."""
        await self._watch.watch()

    def server_ssl(self) -> ssl.SSLContext:
        """Return what a socket of Python is accepted with: the caller has to have a certificate too."""
        return mutual_context(self.current)

    def client_ssl(self) -> ssl.SSLContext:
        """Return what a socket of Python calls with. The name of the server is the caller's to check."""
        return client_context(self.current)

    def _use(self, pair: KeyPair) -> None:
        if self._role not in self.names.roles(pair.names):
            wanted = self.names.name(self._role)
            raise ConfigError(
                f"the certificate is for {', '.join(pair.names) or 'no name'}: that of a {self._role} has to "
                f"have {wanted!r} among its subjectAltNames (`tls_names` is {self.names.pattern!r})"
            )
        mutual_context(pair)  # raises what OpenSSL has against it
        for use in self._listeners:
            use(pair)
