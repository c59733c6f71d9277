"""The router alone: requests per second, streams, policies."""
