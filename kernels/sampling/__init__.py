"""The choice of tokens: masks of grammars, and the race that samples."""
