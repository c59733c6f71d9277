"""Tests of twinfang/stack."""
