"""Rank 0, and the other ranks' processes, which repeat rank 0's calls. They start on one or several hosts."""
