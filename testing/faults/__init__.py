"""Faults that tests switch on, and what is asked meanwhile."""
