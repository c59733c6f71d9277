"""Tests of wire.tls."""
