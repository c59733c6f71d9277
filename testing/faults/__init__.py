"""Faults that tests switch on, and requests that are sent meanwhile."""
