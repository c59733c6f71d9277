"""Tests, room by room. What they share is in testing/."""
