"""Tests of router/serving."""
