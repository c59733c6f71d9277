"""The decode side: what is read from whom, in which parts, and what becomes of it."""
