"""A whole stack under closed load, open load, and overload."""
