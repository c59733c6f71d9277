"""`twinfang check-network`: what UCX would use between two hosts, and how fast that is."""
