"""Tests of kv_transfer."""
