"""Scripted servers over real gRPC, and routers in front of them."""
