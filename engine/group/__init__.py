"""How processes that compute together connect, agree on each step and notice that one of them has ended."""
