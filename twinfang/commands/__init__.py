"""What each command of `twinfang` does before and while it runs."""
