"""Hosts, addresses and origins, as checked by the HTTP servers of several packages."""
