"""A fleet under load whose servers are killed, frozen and drained at random, to check that every answer is
right."""
