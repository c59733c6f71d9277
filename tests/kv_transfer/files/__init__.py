"""Tests of :mod:`kv_transfer.files`."""
