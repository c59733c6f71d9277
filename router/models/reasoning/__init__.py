"""Thinking in chat answers: how models mark it; how it is found, counted, limited, and shown in later turns.

``format_names`` has one entry for each format; everything else is the same for all formats.
"""
