"""Tests of router/kubernetes."""
