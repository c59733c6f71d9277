"""What cached blocks and states save, and what their number formats cost in accuracy."""
