"""Tests of kernels/replay."""
