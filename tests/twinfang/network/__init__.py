"""Tests of twinfang/network."""
