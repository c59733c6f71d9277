"""Tests of router/admin_ui."""
