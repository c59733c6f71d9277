"""Mixers and MLPs that blocks are built of."""
