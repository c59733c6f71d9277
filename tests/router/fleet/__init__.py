"""Tests of router/fleet."""
