"""Tests of twinfang."""
