"""Tests of kv_transfer/leases."""
