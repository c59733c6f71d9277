"""Tests of kernels/ssm."""
