"""Tests of kernels/speculation."""
