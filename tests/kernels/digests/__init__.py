"""Tests of kernels/digests."""
