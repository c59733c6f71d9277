"""The decode side: what is read from whom, in which parts. A transfer says when its quarantine is lifted."""
