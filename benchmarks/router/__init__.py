"""The router alone: requests a second, streams, policies."""
