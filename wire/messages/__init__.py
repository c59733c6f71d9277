"""The messages that processes send to one another."""
