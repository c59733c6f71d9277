"""A fork server and a child that say and do what tests ask for."""
