"""Tests of kernels/formats."""
