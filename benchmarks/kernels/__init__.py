"""Every kernel beside what its machine can do and beside the op that somebody else wrote."""
