"""Servers and routers that answer by a script, over real gRPC."""
