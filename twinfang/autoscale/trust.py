"""How processes whose metrics are read by https:// prove who they are, and how this one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinfang.autoscale.metrics_page import Trust
from wire.errors import ConfigError

if TYPE_CHECKING:
    from twinfang.autoscale.settings import AutoscaleConfig
    from wire.tls.identity import Identity
    from wire.tls.peer_names import PeerRole


class Trusts:
    """The trust in routers and in servers. Raises :class:`ConfigError` if servers are to be read by https://
    without mutual TLS, or a file can't be read."""

    def __init__(self, config: AutoscaleConfig, identity: Identity | None) -> None:
        self._identity = identity
        own = config.router_identity
        is_mutual = identity is not None and own.ca_file is None and not own.server_name
        self._routers = None
        if not is_mutual and any(url.startswith("https:") for url in config.router_urls):
            self._routers = Trust(own.context(), own.server_name)
        servers = (*config.prefill.urls, *config.decode.urls)
        if identity is None and any(url.startswith("https:") for url in servers):
            raise ConfigError(
                "servers show metrics by https:// to callers with a certificate: give --tls-cert, --tls-key "
                "and --tls-ca"
            )

    def of_routers(self) -> Trust | None:
        return self._routers or self._mutual("router")

    def of_servers(self) -> Trust | None:
        return self._mutual("server")

    def _mutual(self, role: PeerRole) -> Trust | None:
        """Made anew each time, since the identity's files may have changed."""
        if self._identity is None:
            return None
        context = self._identity.client_ssl()
        context.check_hostname = True
        return Trust(context, self._identity.names.name(role))
