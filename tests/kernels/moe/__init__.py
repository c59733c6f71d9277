"""Tests of kernels/moe."""
