"""How many connections there are, whose they are, and which of them is closed when there are too many."""
