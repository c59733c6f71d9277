"""Engines in all shapes, and what is asked of them again and again."""
