"""The messages that processes send to each other."""
