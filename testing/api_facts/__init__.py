"""What each field of each endpoint does, as data: tests send it, and docs/api.md has it as a table."""
