"""Checkpoints as published: config and weights read, checked, cut for a rank, or made up."""
