"""Tests of router/models."""
