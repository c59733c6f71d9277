"""Compares every kernel with the machine's limits and with other projects' ops."""
