"""Certificates and private keys of our processes, read again when their files change. Nothing here knows HTTP
or gRPC."""
