"""Tests of router/models/tools."""
