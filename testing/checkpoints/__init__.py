"""Small checkpoints of every family, and the table of features that tests show for each family."""
