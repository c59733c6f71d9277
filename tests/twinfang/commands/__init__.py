"""Tests of twinfang/commands."""
