"""Tests of kv_transfer/nixl."""
