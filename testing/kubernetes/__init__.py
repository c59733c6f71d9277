"""A control plane, and what runs before it."""
