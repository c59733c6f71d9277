"""Tests of router/admission."""
