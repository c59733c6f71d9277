"""Decode rows with drafts: a step's inputs and slots, the drafts, and which drafts and state are kept."""
