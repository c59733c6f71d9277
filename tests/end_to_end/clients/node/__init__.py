"""Clients that are packages of npm: programs that run in Node, and what they need."""
