"""Small checkpoints of every family, and the table of what the tests show of each family."""
