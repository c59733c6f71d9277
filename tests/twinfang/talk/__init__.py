"""Tests of ``twinfang chat`` and ``twinfang complete``."""
