"""Tests of kernels/attention."""
