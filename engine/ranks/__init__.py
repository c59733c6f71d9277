"""Rank 0, the other ranks' processes, which repeat its calls, and how they start on one host or several."""
