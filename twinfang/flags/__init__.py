"""Flags: names, values, defaults, help, and how settings are spelled as flags."""
