"""Tests of twinfang/flags."""
