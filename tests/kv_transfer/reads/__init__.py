"""Tests of kv_transfer/reads."""
