"""What clients see: libraries, errors, deadlines, the dashboard."""
