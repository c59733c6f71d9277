"""Tests of kernels/gated_delta."""
