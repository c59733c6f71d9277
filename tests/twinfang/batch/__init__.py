"""Tests of ``twinfang batch``."""
