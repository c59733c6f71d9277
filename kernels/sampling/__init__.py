"""Inputs of decode rows, drafts and their acceptance, and the choice of tokens."""
