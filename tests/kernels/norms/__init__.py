"""Tests of kernels/norms."""
