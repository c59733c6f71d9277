"""The grid of configurations in which every tier of cached starts must give the same tokens."""
