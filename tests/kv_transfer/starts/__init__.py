"""Tests of :mod:`kv_transfer.starts`."""
