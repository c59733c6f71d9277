"""The commands of `twinfang`: how each is prepared and run."""
