"""Computes which tokens an answer's grammar allows next, in processes other than the one that runs steps."""
