"""Tests of kernels/sampling."""
