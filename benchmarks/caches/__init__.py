"""What cached blocks and states save, and how much accuracy their number formats cost."""
