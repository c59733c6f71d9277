"""`twinfang check-network`: finds which transport UCX would use between two hosts, and measures its speed."""
