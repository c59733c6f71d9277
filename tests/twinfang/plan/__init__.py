"""Tests of twinfang/plan."""
