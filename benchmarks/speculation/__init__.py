"""Drafts: how many are right, and what replaying states costs."""
