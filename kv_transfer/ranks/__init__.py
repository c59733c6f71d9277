"""Reads by servers whose ranks are processes of their own."""
