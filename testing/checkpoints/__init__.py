"""Small checkpoints of every family, and the table of what tests show of each."""
