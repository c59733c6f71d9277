"""The admin API of several router processes on one port."""
