"""Tests of kernels/collectives."""
