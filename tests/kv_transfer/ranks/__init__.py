"""Tests of :mod:`kv_transfer.ranks`."""
