"""Hosts, addresses and origins, as HTTP servers of several rooms check them."""
