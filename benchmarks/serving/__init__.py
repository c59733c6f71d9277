"""A whole stack under load: closed, open and beyond its capacity."""
