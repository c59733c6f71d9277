"""Tests of forked processes."""
