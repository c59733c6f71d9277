"""Tests of twinfang/cache_sim/."""
