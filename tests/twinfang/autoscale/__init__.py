"""Tests of twinfang/autoscale."""
