"""Tests of router/fleet/links."""
