"""Tests of kernels/linear."""
