"""What is measured and remembered: metrics, the last minute, requests with their timelines and traces."""
