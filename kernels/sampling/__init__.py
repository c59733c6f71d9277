"""The choice of tokens: masks of grammars, sampling, and log-probabilities."""
