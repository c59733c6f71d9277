"""Decode rows with drafts: a step's inputs and slots, drafts and which are kept, where the state then is."""
