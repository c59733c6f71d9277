"""The choice of tokens: masks of grammars, and the exponential race that samples."""
