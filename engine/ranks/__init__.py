"""Rank 0, the processes that do as it does, and how they start on one host or several."""
