"""Tests of kernels/gpu."""
